"""Weights of a float checkpoint quantised while it is loaded, into formats that the native kernels read.

Groups are 32 neighbouring inputs of one output, rounded to nearest with the scale that the format stores (fp16):

    q8   Q8_0: w = q * d, d = largest |w| / 127
    q4   Q4_1: w = q * d + m, m = the least w, d = (most - least) / 15; the embedding and the head become q8

The layouts of the blocks are ggml's (ggml-org/ggml, src/ggml-common.h).
"""

from __future__ import annotations

import numpy as np

from headrace.ops.native.packed import StoredTensor

GROUP = 32
_ROWS = 1 << 20  # numbers quantised at a time: temporary memory stays small


def quantized(values: np.ndarray, kind: str) -> StoredTensor:
    """float32 [N, K] as `kind`. Raises ValueError if K does not divide into groups or a number is not finite."""
    rows, inputs = values.shape
    if inputs % GROUP:
        raise ValueError(f"{inputs} inputs do not divide into groups of {GROUP}; leave out quantize")
    quantize, name, size = {"q8": (_q8, "Q8_0", 34), "q4": (_q4, "Q4_1", 20)}[kind]
    out = np.empty((rows, inputs // GROUP, size), np.uint8)
    step = max(1, _ROWS // inputs)
    for first in range(0, rows, step):
        part = np.asarray(values[first : first + step], np.float32).reshape(-1, inputs // GROUP, GROUP)
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
    out[..., 4:] = q[..., :16] | q[..., 16:] << 4
