"""Debug flags read from the environment; everything a user should set is an option instead."""

from __future__ import annotations

import os
from pathlib import Path

# HEADRACE_NATIVE_LIBRARY names another build of it, such as one with sanitizers
NATIVE_LIBRARY = Path(
    os.environ.get("HEADRACE_NATIVE_LIBRARY") or Path(__file__).with_name("ops") / "native" / "libheadrace.so"
)


def check_every_step() -> bool:
    """HEADRACE_CHECK=1: account for every block and row after each step, not only when idle."""
    return os.environ.get("HEADRACE_CHECK", "0") == "1"


def mark_steps() -> bool:
    """HEADRACE_NVTX=1: steps on a GPU are ranges in NVIDIA's profilers, named by what they do."""
    return os.environ.get("HEADRACE_NVTX", "0") == "1"


def native_kernels() -> bool:
    """Whether the native CPU kernels were built and are wanted (HEADRACE_NATIVE=0: not). They are not loaded for it."""
    return os.environ.get("HEADRACE_NATIVE", "1") != "0" and NATIVE_LIBRARY.exists()
