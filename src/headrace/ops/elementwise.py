"""Sums, products and caps between the layers of a model."""

from __future__ import annotations

from headrace.ops.registry import op
from headrace.ops.xp import Array, emit, namespace


@op
def add(x: Array, y: Array, out: Array | None = None) -> Array:
    """x + y of one shape; `out` may be either of them."""
    return emit(x + y, out)


@op
def scale(x: Array, factor: float, out: Array | None = None) -> Array:
    """x * factor, the factor rounded to x's type first; `out` may be x itself."""
    return emit(x * factor, out)


@op
def soft_cap(x: Array, cap: float, out: Array | None = None) -> Array:
    """cap * tanh(x / cap): every number into -cap .. cap, small ones unchanged (Gemma 2); `out` may be x itself."""
    return emit(cap * namespace(x).tanh(x / cap), out)
