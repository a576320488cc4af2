"""What decode and prefill attention share: a layer's shape and scores, and rows with their block tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SHARED = 200 << 10  # bytes of shared memory that a program may fill with keys and values


@dataclass(frozen=True)
class HeadShape:
    """Heads of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Scores:
    """What a layer does to its scores; `window` counts the query itself, 0: none."""

    scale: float
    soft_cap: float | None = None
    window: int = 0
    sinks: torch.Tensor | None = None  # float32 [heads]


@dataclass(frozen=True)
class PagedRows:
    """The rows of a launch, as the GPU knows them."""

    block_tables: torch.Tensor  # int32 [max rows, max blocks] of one layer group
    rows: torch.Tensor  # int32 [R]
    query_start: torch.Tensor  # int32 [R + 1]
    seq_lens: torch.Tensor  # int32 [R]
    num_rows: torch.Tensor  # int32 [1]  those that are not padding


def num_stages(wanted: int, step: int, width: int, q: torch.Tensor) -> int:
    """Tiles of keys and values to be in flight: as many as wanted, if shared memory holds them."""
    return max(1, min(wanted, _SHARED // (2 * step * width * q.element_size())))
