"""Copies of activations, as ops so that a recorded pass makes them too."""

from __future__ import annotations

from headrace.ops.registry import op
from headrace.ops.xp import Array, fresh, namespace


@op
def copied(x: Array) -> Array:
    """x [T, H] in float32 memory of its own."""
    return fresh(x)


@op
def joined(x: Array, y: Array) -> Array:
    """[T, A + B]: x [T, A] and y [T, B] side by side."""
    return namespace(x).concat([x, y], axis=1)
