"""The attention interface: what a backend can do, planning once a step, running once a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from headrace.core.kv_layout import KVGroup
from headrace.ops.xp import Array


@dataclass(frozen=True)
class LayerAttention:
    """What one layer asks of attention."""

    scale: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # positions q-window+1 .. q are visible
    soft_cap: float | None = None  # logits become cap * tanh(logits / cap)
    sinks: Array | None = None  # float32 [num_heads]: a logit per head that takes probability and gives no value


@dataclass(frozen=True)
class AttentionCaps:
    """What a backend can do; `refusals` lists every reason why it cannot serve a request."""

    devices: frozenset[str]
    kv_formats: frozenset[str]
    head_dims: frozenset[int] | None = None  # None: any
    block_multiple: int = 1  # block_size must be a multiple of this
    block_tile: int | None = None  # block_size must divide this or be a multiple of it; None: any
    windows: bool = True
    soft_cap: bool = True
    sinks: bool = True
    graph_support: bool = False
    trees: bool = False  # spans that are token trees (StepBatch.parents)
    whole_blocks: bool = False  # pages may lie apart, as long as each block of them is contiguous

    def refusals(self, device: str, kv_format: str, layer: LayerAttention, block_size: int) -> list[str]:
        """Every reason why this backend cannot serve `layer`; empty when it can."""
        reasons = []
        if device not in self.devices:
            reasons.append(f"runs on {', '.join(sorted(self.devices))}, not on {device}")
        if kv_format not in self.kv_formats:
            reasons.append(f"reads KV as {', '.join(sorted(self.kv_formats))}, not {kv_format}")
        if self.head_dims is not None and layer.head_dim not in self.head_dims:
            reasons.append(f"head_dim {layer.head_dim} is not one of {sorted(self.head_dims)}")
        if block_size % self.block_multiple:
            reasons.append(f"block size {block_size} is not a multiple of {self.block_multiple}")
        if self.block_tile is not None and self.block_tile % block_size and block_size % self.block_tile:
            reasons.append(f"block size {block_size} neither divides {self.block_tile} nor is a multiple of it")
        if layer.window is not None and not self.windows:
            reasons.append("has no sliding window")
        if layer.soft_cap is not None and not self.soft_cap:
            reasons.append("has no logit soft cap")
        if layer.sinks is not None and not self.sinks:
            reasons.append("has no attention sinks")
        return reasons


class AttentionBackend(Protocol):
    """Writes a step's keys and values into the cache and attends over it, one span at a time or all at once."""

    name: str
    caps: AttentionCaps
    kv_format: str  # one of caps.kv_formats; `select_backend` sets it

    def plan(self, batch: Any, group: int, spec: KVGroup) -> Any:
        """Metadata of `batch` (a StepBatch) for one layer group, shared by the group's layers."""
        ...

    def move(self, cache: tuple[Array, Array], sources: Array, destinations: Array) -> None:
        """Copy the keys and values of tokens in one layer's pages from slots `sources` to `destinations`, int [N]. Only
        backends that serve token trees have it."""
        ...

    def run(self, q: Array, k: Array, v: Array, cache: tuple[Array, Array], meta: Any, layer: LayerAttention) -> Array:
        """Attention output float [T, num_heads * head_dim] of q [T, num_heads * head_dim], k and v [T, kv heads *
        head_dim] after writing k and v into `cache` (key pages, value pages: [num_blocks, block_size, kv heads,
        head_dim])."""
        ...
