"""GGUF files written byte by byte, so that tests can get any of it wrong."""

from __future__ import annotations

import struct
from typing import Any


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes, length: int | None = None) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return u64(len(data) if length is None else length) + data


def pair(key: str, value: Any) -> bytes:
    """A key/value pair; a bytes value is (type and value) as they are to stand in the file."""
    if isinstance(value, bytes):
        return string(key) + value
    if isinstance(value, bool):
        return string(key) + u32(7) + bytes([value])
    if isinstance(value, int):
        return string(key) + u32(4) + u32(value)
    if isinstance(value, float):
        return string(key) + u32(6) + struct.pack("<f", value)
    if isinstance(value, str):
        return string(key) + u32(8) + string(value)
    return string(key) + u32(9) + u32(8) + u64(len(value)) + b"".join(map(string, value))


def info(name: str, dims: list[int], kind: int, offset: int, num_dims: int | None = None) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    return string(name) + u32(count) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def gguf(
    pairs: list[bytes] | None = None,
    infos: list[bytes] | None = None,
    data: bytes = b"",
    *,
    version: int = 3,
    num_tensors: int | None = None,
    num_pairs: int | None = None,
    magic: bytes = b"GGUF",
) -> bytes:
    pairs, infos = pairs or [], infos or []
    head = magic + u32(version)
    head += u64(len(infos) if num_tensors is None else num_tensors) + u64(
        len(pairs) if num_pairs is None else num_pairs
    )
    head += b"".join(pairs) + b"".join(infos)
    return head + b"\0" * (-len(head) % 32) + data


F32_TENSOR = struct.pack("<8f", *range(1, 9))
SOUND = gguf(
    [pair("general.architecture", "llama"), pair("a.list", ["x", "yy", "é"]), pair("n", 7), pair("f", 0.5)],
    [info("w", [4, 2], 0, 0)],
    F32_TENSOR,
)
