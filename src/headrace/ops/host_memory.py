"""Memory of the system on large pages: fewer of them are looked up, and fewer first touches stop a step."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

_HUGE_PAGE = 1 << 21


def untouched(num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes], zeros that take no memory until they are touched, and then by pages of 2 MiB where the system
    has such. MemoryError where the system does not give so much address space."""
    # private, because pages of shared memory are small ones on most systems, whatever is asked for
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, **private)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    return whole[start : start + num_bytes]
