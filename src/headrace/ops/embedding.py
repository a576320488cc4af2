"""Embedding lookup."""

from __future__ import annotations

from headrace.ops.registry import op
from headrace.ops.xp import Array, emit, namespace


@op
def embedding(token_ids: Array, weight: Array, out: Array | None = None) -> Array:
    """The vectors [T, H] of token_ids [T], rows of weight [V, H]. Ids must lie in 0 .. V-1: the caller checks."""
    return emit(namespace(weight).take(weight, token_ids, axis=0), out)
