"""How the KV cache is cut: one pool of equal-sized blocks, shared by groups of layers.

All layers of a group see the same positions (all full attention, or all the same window), so they share one block
table. Layer j of every group lives in memory tensor j; a block id names the same block in all of them:

    tensor 0: | block 0 | block 1 | block 2 | ...      <- layer 0 of group 0, of group 1, ...
    tensor 1: | block 0 | block 1 | block 2 | ...      <- layer 1 of group 0, of group 1, ...

A block belongs to one group at a time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVGroup:
    """Layers that share one block table."""

    layers: tuple[int, ...]  # model layer indices, in tensor order
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # tokens a query can look back over, itself included; None: all


@dataclass(frozen=True)
class KVLayout:
    """One pool: `num_blocks` blocks of `block_size` tokens, used by `groups`."""

    groups: tuple[KVGroup, ...]
    block_size: int
    num_blocks: int
    bytes_per_element: int = 4

    @property
    def num_tensors(self) -> int:
        """Memory tensors per key and per value: the most layers any group has."""
        return max(len(group.layers) for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes over all its tensors, keys and values."""
        widest = max(group.num_kv_heads * group.head_dim for group in self.groups)
        return 2 * self.num_tensors * self.block_size * widest * self.bytes_per_element

    @property
    def num_tokens(self) -> int:
        """Tokens that fit when every group keeps every position."""
        return self.num_blocks // len(self.groups) * self.block_size

    def place(self, layer: int) -> tuple[int, int]:
        """(group, tensor) of a model layer."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise ValueError(f"layer {layer} is in no KV group")
