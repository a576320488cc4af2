"""How keys and values are stored in the cache: a format, and the reference of packing and reading it.

A vector (one head of one token) of D numbers takes `vector_bytes(D)` bytes. float32 pages are float32 arrays; pages of
the other formats are uint8 arrays [..., vector_bytes], which only ops and attention backends read:

    bfloat16   D numbers of 2 bytes, rounded to nearest, ties to even
    int8       D signed bytes, then a float32 scale: x = q * scale, scale = largest |x| / 127
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class KVFormat:
    """A storage format of keys and values."""

    name: str
    element_bytes: int
    scale_bytes: int = 0  # of a vector

    def vector_bytes(self, dim: int) -> int:
        """Bytes of a vector of `dim` numbers."""
        return dim * self.element_bytes + self.scale_bytes

    def stored(self, dim: int) -> tuple[type, int]:
        """(type, length of the last axis) of pages whose vectors have `dim` numbers."""
        return (np.float32, dim) if self.name == "float32" else (np.uint8, self.vector_bytes(dim))

    def pages(self, shape: tuple[int, int, int, int]) -> np.ndarray:
        """Zeroed pages [num_blocks, block_size, kv heads, D], whose memory is not touched yet."""
        dtype, stored = self.stored(shape[-1])
        return np.zeros((*shape[:-1], stored), dtype)

    def pack(self, x: np.ndarray) -> np.ndarray:
        """float32 [..., D] -> what pages hold: float32 [..., D] or uint8 [..., vector_bytes]. A vector with a number
        that is not finite reads as NaN or infinities: damage stays visible."""
        if self.name == "float32":
            return x
        x = np.ascontiguousarray(x, np.float32)
        if self.name == "bfloat16":
            bits = x.view(np.uint32)
            rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
            nan = (bits & 0x7FFFFFFF) > 0x7F800000
            return np.where(nan, bits >> 16 | 0x40, rounded).astype(np.uint16).view(np.uint8)
        finite = np.isfinite(x).all(-1, keepdims=True)
        most = np.max(np.abs(np.where(finite, x, 0.0)), -1, keepdims=True)
        most[most < 1e-30] = 0.0  # too small to be inverted
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            inverse = np.where(most > 0, np.float32(127.0) / most, np.float32(0.0))
            q = np.where(finite, np.rint(x * inverse), 0.0).astype(np.int8)
        scale = np.where(finite, most / np.float32(127.0), np.float32(np.nan)).astype(np.float32)
        return np.concatenate([q.view(np.uint8), np.ascontiguousarray(scale).view(np.uint8)], -1)

    def unpack(self, stored: np.ndarray) -> np.ndarray:
        """What `pack` made, as float32 [..., D]."""
        if self.name == "float32":
            return stored
        stored = np.ascontiguousarray(stored)
        if self.name == "bfloat16":
            return (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        scale = np.ascontiguousarray(stored[..., -4:]).view(np.float32)
        return stored[..., :-4].view(np.int8).astype(np.float32) * scale


FLOAT32 = KVFormat("float32", 4)
KV_FORMATS = {each.name: each for each in (FLOAT32, KVFormat("bfloat16", 2), KVFormat("int8", 1, 4))}
