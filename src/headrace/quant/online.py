"""Weights of a float checkpoint quantised while it is loaded, into formats that the native kernels read.

Groups are 32 or 64 neighbouring inputs of one output, rounded to nearest with the scale that the format stores (fp16):

    q8   Q8_0 or Q8_64: w = q * d, d = largest |w| / 127
    q4   Q4_1 or Q4_64: w = q * d + m, m = the least w, d = (most - least) / 15; the embedding and the head become q8

The layouts of the blocks of 32 are ggml's (ggml-org/ggml, src/ggml-common.h), and those of 64 the same with twice the
numbers: a weight then takes 8.25 or 4.5 bits instead of 8.5 or 5.
"""

from __future__ import annotations

import numpy as np

from headrace.ops.native.packed import StoredTensor

GROUPS = (32, 64)
_ROWS = 1 << 20  # numbers quantised at a time: temporary memory stays small


def quantized(values: np.ndarray, kind: str, group: int = 32) -> StoredTensor:
    """float32 [N, K] as `kind`, `group` (one of GROUPS) numbers to a scale. Raises ValueError if K does not divide into
    groups or a number is not finite."""
    rows, inputs = values.shape
    if inputs % group:
        remedy = "leave out quantize" if inputs % GROUPS[0] else f"give quantize_group={GROUPS[0]}"
        raise ValueError(f"{inputs} inputs do not divide into groups of {group}; {remedy}")
    quantize, bits, head = {"q8": (_q8, 8, 2), "q4": (_q4, 4, 4)}[kind]
    name = {"q8": {32: "Q8_0", 64: "Q8_64"}, "q4": {32: "Q4_1", 64: "Q4_64"}}[kind][group]
    out = np.empty((rows, inputs // group, head + group * bits // 8), np.uint8)
    step = max(1, _ROWS // inputs)
    for first in range(0, rows, step):
        part = np.asarray(values[first : first + step], np.float32).reshape(-1, inputs // group, group)
        if not np.isfinite(part).all():
            raise ValueError("holds values that are not finite")
        quantize(part, out[first : first + step])
    return StoredTensor(name, out.reshape(rows, -1), None)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale, 0 where the scale is 0: all weights of the group are then alike."""
    wide = scale.astype(np.float32)
    return np.divide(1.0, wide, out=np.zeros_like(wide), where=wide > 0)


def _half(values: np.ndarray) -> np.ndarray:
    """fp16, the largest of which stands for what is beyond it."""
    return np.clip(values, -65504.0, 65504.0).astype(np.float16)


def _q8(part: np.ndarray, out: np.ndarray) -> None:
    scale = _half(np.abs(part).max(-1, keepdims=True) / 127.0)
    q = np.clip(np.rint(part * _inverse(scale)), -127, 127).astype(np.int8)
    out[..., :2] = scale.view(np.uint8)
    out[..., 2:] = q.view(np.uint8)


def _q4(part: np.ndarray, out: np.ndarray) -> None:
    least = _half(part.min(-1, keepdims=True))
    scale = _half((part.max(-1, keepdims=True) - least.astype(np.float32)) / 15.0)
    q = np.clip(np.rint((part - least.astype(np.float32)) * _inverse(scale)), 0, 15).astype(np.uint8)
    out[..., :2] = scale.view(np.uint8)
    out[..., 2:4] = least.view(np.uint8)
    half = q.shape[-1] // 2
    out[..., 4:] = q[..., :half] | q[..., half:] << 4
