"""Quantised matrices made up at random, as a GGUF file holds them."""

from __future__ import annotations

import gguf
import numpy as np

SCALE_OFFSETS = {  # of the fp16 scales in a block
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),  # not read packed
}
SPREAD = {
    "IQ4_NL": 100,
    "Q8_0": 100,
    "Q4_K": 60 * 12,
    "Q5_K": 60 * 24,
    "Q6_K": 100 * 24,
}  # of a weight, in units of its scale
GROUPED = {"Q4_64": (36, (0, 2), 8), "Q8_64": (66, (0,), 100)}  # bytes of 64 weights, places of fp16 scales, spread
FORMATS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]  # GGUF's


def random_rows(rng: np.random.Generator, format: str, rows: int, k: int, std: float = 0.1) -> np.ndarray:
    """uint8 [rows, row bytes]: random bits in every field, scales such that weights are about `std` in size."""
    if format == "I8":
        data = rng.integers(0, 256, (rows, k // 32, 36), dtype=np.uint8)
        scale = std / 100 * (1 + rng.random((rows, k // 32, 1)))
        data[:, :, :4] = scale.astype(np.float32).view(np.uint8)
        return data.reshape(rows, -1)
    if format in GROUPED:
        size, offsets, spread = GROUPED[format]
        data = rng.integers(0, 256, (rows, k // 64, size), dtype=np.uint8)
        for offset in offsets:
            scale = std / spread * (1 + rng.random((rows, k // 64, 1))) * rng.choice([-1, 1])
            data[:, :, offset : offset + 2] = scale.astype(np.float16).view(np.uint8)
        return data.reshape(rows, -1)
    if format not in SCALE_OFFSETS:
        values = (rng.standard_normal((rows, k)) * std).astype(np.float32)
        if format == "BF16":
            return np.ascontiguousarray(values.view(np.uint32) >> 16, np.uint32).astype(np.uint16).view(np.uint8)
        return values.astype({"F32": np.float32, "F16": np.float16}[format]).view(np.uint8)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format]]
    data = rng.integers(0, 256, (rows, k // block, size), dtype=np.uint8)
    for offset in SCALE_OFFSETS[format]:
        scale = std / SPREAD.get(format, 8) * (1 + rng.random((rows, k // block, 1))) * rng.choice([-1, 1])
        data[:, :, offset : offset + 2] = scale.astype(np.float16).view(np.uint8)
    return data.reshape(rows, -1)


def dequantized(format: str, rows: np.ndarray) -> np.ndarray:
    """What gguf makes of them, float32."""
    if format == "I8":
        blocks = rows.reshape(len(rows), -1, 36)
        scale = np.ascontiguousarray(blocks[:, :, :4]).view(np.float32)
        return (blocks[:, :, 4:].view(np.int8) * scale).reshape(len(rows), -1)
    if format in GROUPED:
        blocks = rows.reshape(len(rows), -1, GROUPED[format][0])
        d = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16).astype(np.float32)
        if format == "Q8_64":
            return (blocks[:, :, 2:].view(np.int8) * d).reshape(len(rows), -1)
        m = np.ascontiguousarray(blocks[:, :, 2:4]).view(np.float16).astype(np.float32)
        q = np.concatenate([blocks[:, :, 4:] & 15, blocks[:, :, 4:] >> 4], -1).astype(np.float32)
        # the product is exact in float32, so that one rounding is left, as in a fused multiply-add
        return (q * d + m).reshape(len(rows), -1)
    if format == "F32":
        return rows.view(np.float32)
    if format == "F16":
        return rows.view(np.float16).astype(np.float32)
    if format == "BF16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[format])
