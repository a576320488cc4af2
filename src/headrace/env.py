"""Debug flags read from the environment; everything a user should set is an option instead."""

from __future__ import annotations

import os


def check_every_step() -> bool:
    """HEADRACE_CHECK=1: account for every block and row after each step, not only when idle."""
    return os.environ.get("HEADRACE_CHECK", "0") == "1"


def mark_steps() -> bool:
    """HEADRACE_NVTX=1: steps on a GPU are ranges in NVIDIA's profilers, named by what they do."""
    return os.environ.get("HEADRACE_NVTX", "0") == "1"
