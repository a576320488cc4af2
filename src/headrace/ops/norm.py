"""Root-mean-square normalisation (Zhang and Sennrich 2019), alone and behind a residual sum."""

from __future__ import annotations

from headrace.ops.registry import op
from headrace.ops.xp import Array, emit, namespace


def _normalise(x: Array, weight: Array, eps: float) -> Array:
    # One reduction per token over a contiguous last axis: numpy's pairwise order then depends on its length alone.
    xp = namespace(x)
    square = xp.mean(x * x, axis=-1, keepdims=True)
    return x * (1.0 / xp.sqrt(square + eps)) * weight


@op
def rms_norm(x: Array, weight: Array, eps: float, out: Array | None = None) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis of x [..., H]; weight [H]. `out` may be x itself."""
    return emit(_normalise(x, weight, eps), out)


@op
def add_rms_norm(x: Array, residual: Array, weight: Array, eps: float, out: Array | None = None) -> tuple[Array, Array]:
    """(rms_norm(residual + x), residual + x), all [T, H]. `residual` is overwritten with the sum and returned."""
    residual += x
    return emit(_normalise(residual, weight, eps), out), residual
