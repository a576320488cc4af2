"""Arrays of strings in a GGUF file's metadata: a 64-bit length, then the bytes, over and over.

A vocabulary and its merges are a hundred thousand strings, which the native library walks where it is there.
"""

from __future__ import annotations

import mmap
import struct

import numpy as np

from headrace.ops.native.library import address, available, library

_LENGTH = struct.Struct("<Q")


def skip(buffer: mmap.mmap, position: int, count: int) -> int:
    """Where `count` strings that begin at `position` end; struct.error if they run past the end of the file."""
    if available():
        data = np.frombuffer(buffer, np.uint8)
        end = library().join_strings(address(data), len(data), position, count, None)
        if end < 0:
            raise struct.error("a string runs past the end")
        return int(end)
    for _ in range(count):
        position += 8 + _LENGTH.unpack_from(buffer, position)[0]
    if position > len(buffer):
        raise struct.error("a string runs past the end")
    return position


def read(buffer: mmap.mmap, position: int, count: int) -> list[str]:
    """The strings, which `skip` has found to lie inside the file. Bytes that are not UTF-8 become U+FFFD."""
    if count and available():
        data = np.frombuffer(buffer, np.uint8)
        end = skip(buffer, position, count)
        out = np.empty(end - position, np.uint8)  # the lengths take more room than the separators
        if library().join_strings(address(data), len(data), position, count, address(out)) >= 0:
            size = end - position - 8 * count + count - 1
            return out[:size].tobytes().decode("utf-8", "replace").split("\0")
    found = []
    for _ in range(count):
        start = position + 8
        position = start + _LENGTH.unpack_from(buffer, position)[0]
        found.append(buffer[start:position].decode("utf-8", "replace"))
    return found
