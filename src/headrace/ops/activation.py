"""Gated activations over a merged projection: activation(gate) * up (Shazeer 2020, "GLU variants")."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from headrace.ops.registry import Op, op
from headrace.ops.xp import Array, emit, namespace

SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0
_ERF_STEP = 1 / 256
_ERF_LIMIT = 6.0  # erf is 1 in float32 from 3.9 on


def _split(x: Array) -> tuple[Array, Array]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


@op
def silu_mul(x: Array, out: Array | None = None) -> Array:
    """silu(gate) * up for x [T, 2I] = gate | up: [T, I]; silu(g) = g / (1 + exp(-g))."""
    gate, up = _split(x)
    xp = namespace(x)
    # Below -80 the quotient is under 1e-33 either way; the clip keeps exp from overflowing.
    return emit(gate / (xp.exp(xp.clip(-gate, None, 80.0)) + 1.0) * up, out)


@op
def gelu_tanh_mul(x: Array, out: Array | None = None) -> Array:
    """gelu(gate) * up for x [T, 2I] = gate | up: [T, I], gelu in its tanh form (Hendrycks and Gimpel 2016)."""
    gate, up = _split(x)
    xp = namespace(x)
    inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * (gate * gate * gate))
    return emit(0.5 * gate * (1.0 + xp.tanh(inner)) * up, out)


@op
def gelu_mul(x: Array, out: Array | None = None) -> Array:
    """gelu(gate) * up for x [T, 2I] = gate | up: [T, I], gelu(g) = g/2 * (1 + erf(g / sqrt 2))."""
    gate, up = _split(x)
    return emit(0.5 * gate * (1.0 + _erf(gate * math.sqrt(0.5))) * up, out)


@op
def swiglu_clamped_mul(x: Array, out: Array | None = None) -> Array:
    """(up + 1) * gate * sigmoid(1.702 gate) for x [T, 2I] = gate | up: [T, I], with gate at most 7 and up in -7 .. 7.

    Source: GPT-OSS's model card and reference code (OpenAI 2025).
    """
    gate, up = _split(x)
    xp = namespace(x)
    gate = xp.clip(gate, None, SWIGLU_LIMIT)
    up = xp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return emit(gate / (xp.exp(xp.clip(-SWIGLU_ALPHA * gate, None, 80.0)) + 1.0) * (up + 1.0), out)


ACTIVATIONS: dict[str, Op] = {
    "silu": silu_mul,
    "gelu": gelu_mul,
    "gelu_tanh": gelu_tanh_mul,
    "swiglu_clamped": swiglu_clamped_mul,
}


@cache
def _erf_table() -> tuple[np.ndarray, np.ndarray]:
    """Grid points and the error function at them, from math.erf; float64."""
    grid = np.arange(-_ERF_LIMIT, _ERF_LIMIT + _ERF_STEP, _ERF_STEP)
    return grid, np.array([math.erf(point) for point in grid])


def _erf(x: Array) -> Array:
    """The error function; numpy has none, so there a Taylor step from the nearest grid point, good to 1e-12."""
    xp = namespace(x)
    if xp is not np:
        return xp.erf(x)
    grid, values = _erf_table()
    wide = np.clip(x, -_ERF_LIMIT, _ERF_LIMIT).astype(np.float64)
    index = np.nan_to_num((wide + _ERF_LIMIT) * (1 / _ERF_STEP) + 0.5).astype(np.int64)
    near = grid[index]
    step = wide - near
    slope = 2 / math.sqrt(math.pi) * np.exp(-near * near)
    curve = 1 + step * (-near + step * ((2 * near * near - 1) / 3 + step * near * (3 - 2 * near * near) / 6))
    return (values[index] + slope * step * curve).astype(x.dtype)
