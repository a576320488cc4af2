"""Threads of native kernels leave the processor alone between two jobs: who else needs it, such as a server's process
that talks to clients, must not wait for threads that wait."""

from __future__ import annotations

import os
import statistics
import time

import numpy as np
import pytest

from headrace.ops.native import library as native

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels were not built")
ROWS, SIZE, JOBS, GAP = 64, 2048, 60, 0.002  # seconds between two jobs, far more than any spin
SPIN = 50e-6  # seconds that a waiting thread may take at most


def cost(threads: int) -> float:
    """Seconds of processor time of a job and the gap behind it, in all threads."""
    functions = native.library()
    x, out = np.ones((ROWS, SIZE), np.float32), np.empty((ROWS, SIZE), np.float32)
    functions.set_num_threads(threads)
    times = []
    for _ in range(JOBS):
        began = time.process_time()
        functions.elementwise(1, x.ctypes.data, SIZE, 0, 0, 2.0, out.ctypes.data, SIZE, ROWS, SIZE)
        time.sleep(GAP)
        times.append(time.process_time() - began)
    return statistics.median(times)


def test_waiting_threads_sleep():
    threads = min(4, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else 2
    try:
        alone = cost(1)
        together = cost(max(2, threads))
    finally:
        native.library().set_num_threads(threads)
    # each thread spins once behind a job; waking and going to sleep cost some microseconds more
    assert (together - alone) / max(2, threads) < SPIN + 20e-6, (alone, together)
