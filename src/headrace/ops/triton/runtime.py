"""What every kernel file needs: how this process launches, and the dtype that activations have in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from headrace.ops.triton.interpreted import repair

    repair()


@dataclass
class Runtime:
    """Chosen when the ops are bound, before the first step."""

    activation: torch.dtype = torch.bfloat16


RUNTIME = Runtime()


@cache
def dependent_launch() -> bool:
    """Whether kernels start while the one before them ends (programmatic dependent launch: Hopper and later).

    Such a kernel may prefetch what no kernel writes (weights) and then waits until all before it have finished.
    """
    return not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def launch_options(num_warps: int = 4, num_stages: int = 1) -> dict[str, Any]:
    """Keywords of a kernel call. Every kernel has a constexpr PDL and waits where it is true."""
    options: dict[str, Any] = {"PDL": dependent_launch(), "num_warps": num_warps, "num_stages": num_stages}
    if options["PDL"]:
        options["launch_pdl"] = True
    return options


@cache
def num_processors() -> int:
    """Streaming multiprocessors of the GPU; 132, an H100's, where kernels are interpreted."""
    if INTERPRETED or not torch.cuda.is_available():
        return 132
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least `count` and `least`."""
    return 1 << (max(count, least) - 1).bit_length()
