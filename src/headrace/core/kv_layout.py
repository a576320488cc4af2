"""How the KV cache is cut: one pool of equal-sized blocks, shared by groups of layers.

All layers of a group see the same positions (all full attention, or all the same window), so they share one block
table. Layer j of every group lives in memory tensor j; a block id names the same block in all of them:

    tensor 0: | block 0 | block 1 | block 2 | ...      <- layer 0 of group 0, of group 1, ...
    tensor 1: | block 0 | block 1 | block 2 | ...      <- layer 1 of group 0, of group 1, ...

A block belongs to one group at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


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
    bytes_per_element: float = 4  # scales included
    max_span: int = 0  # longest span of one step: what a window group holds beyond its window
    kv_format: str = "float32"  # name of the format of keys and values

    @property
    def num_tensors(self) -> int:
        """Memory tensors per key and per value: the most layers any group has."""
        return max(len(group.layers) for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes over all its tensors, keys and values."""
        widest = max(group.num_kv_heads * group.head_dim for group in self.groups)
        return round(2 * self.num_tensors * self.block_size * widest * self.bytes_per_element)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` keeps at most, over all groups."""
        blocks = -(-num_tokens // self.block_size)
        return sum(min(blocks, self._most(group)) for group in self.groups)

    def _most(self, group: KVGroup) -> int:
        """Blocks of one sequence that a group keeps however long it is: its window and one step's span, unaligned."""
        if group.window is None:
            return 2**31
        return -(-(group.window + self.max_span) // self.block_size) + 1

    @cached_property
    def num_tokens(self) -> int:
        """The longest sequence that the whole pool can hold."""
        low, high = 0, self.num_blocks * self.block_size  # what fits, what may not
        if self.blocks_for(2**31) <= self.num_blocks:
            return 2**31 - 1
        while low + 1 < high + 1:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks_for(middle) <= self.num_blocks else (low, middle - 1)
        return low

    def place(self, layer: int) -> tuple[int, int]:
        """(group, tensor) of a model layer."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise ValueError(f"layer {layer} is in no KV group")
