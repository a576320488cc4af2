"""Rotary position embedding (Su et al. 2021, section 3.2), in the half-split ("neox") order of Hugging Face."""

from __future__ import annotations

from headrace.ops.registry import op
from headrace.ops.xp import Array, namespace


@op
def rope(x: Array, cos: Array, sin: Array, out: Array | None = None) -> Array:
    """Rotate heads: x [T, heads, D] by cos and sin [T, R/2] of each token's angles, R = rotary dimensions <= D.

    Dimension i turns with dimension i + R/2; dimensions from R on pass unchanged. `out` may be x itself.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    low, high = x[..., :half], x[..., half : 2 * half]
    rotated_low = low * cos - high * sin
    rotated_high = high * cos + low * sin
    if out is None:
        out = namespace(x).empty(tuple(x.shape), dtype=x.dtype)
    if out is not x and x.shape[-1] > 2 * half:
        out[..., 2 * half :] = x[..., 2 * half :]
    out[..., :half] = rotated_low
    out[..., half : 2 * half] = rotated_high
    return out
