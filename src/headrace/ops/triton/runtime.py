"""What every kernel file needs: how this process launches, and the dtype that activations have in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from headrace.ops.triton.interpreted import repair

    repair()


class Launches(Protocol):
    """What stands between a kernel's call and its compiler (ops/triton/ahead.py)."""

    recording: bool  # calls are only noted, and launch nothing

    def note(self, kernel: Kernel, key: tuple[Any, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """A call while `recording`."""
        ...

    def settle(self, kernel: Kernel, key: tuple[Any, ...]) -> None:
        """A variant is about to be compiled or loaded: wait for it, where another thread is at it."""
        ...


@dataclass
class Runtime:
    """Chosen when the ops are bound, before the first step."""

    activation: torch.dtype = torch.bfloat16
    invariant: bool = False  # a row's bits do not depend on what else is in its step
    launches: Launches | None = None  # of an engine that compiles ahead
    loaded: int = 0  # compiled variants that calls have asked for


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
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def power_of_two(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least `count` and `least`."""
    return 1 << (max(count, least) - 1).bit_length()


# the call below goes through the inside of Triton, which other versions may have changed
KNOWN_INSIDE = triton.__version__.startswith("3.6.")


class Kernel:
    """A Triton kernel whose calls cost the host little.

    Triton's own call works out anew each time which of its compiled variants fits, which takes longer than the launch;
    here a call is recognised by what decides that. Only under a Triton whose inside is known: under another one calls
    are Triton's own, and `headrace doctor` says so.

    Called as any Triton kernel, kernel[grid](*arguments, **constants): first all arguments, in order, then the
    constants by name.
    """

    def __init__(self, function: Callable[..., None], do_not_specialize: tuple[str, ...] = ()):
        self.jit = triton.jit(function, do_not_specialize=list(do_not_specialize))
        self._names = list(self.jit.arg_names)
        self._plain = {self._names.index(name) for name in do_not_specialize}
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if INTERPRETED or not KNOWN_INSIDE:
            return self.jit[grid]

        def call(*arguments: Any, **constants: Any) -> None:
            self._call((*grid, 1, 1)[:3], arguments, constants)

        return call

    def key(self, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
        """What decides which compiled variant a call takes."""
        if self._plain:
            plain = self._plain
            return (
                *(type(a) if i in plain else _variant(a) for i, a in enumerate(arguments)),
                *constants.values(),
            )
        return (*map(_variant, arguments), *constants.values())

    def _call(self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        key = self.key(arguments, constants)
        launches = RUNTIME.launches
        if launches is not None and launches.recording:
            launches.note(self, key, arguments, constants)
            return
        found = self._compiled.get(key)
        if found is None:
            if launches is not None:
                launches.settle(self, key)
            RUNTIME.loaded += 1
            compiled = self.jit[grid](*arguments, **constants)
            values = tuple(constants[name] for name in self._names[len(arguments) :])
            self._compiled[key] = compiled, values
            return
        compiled, values = found
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *values)


def _variant(argument: Any) -> Any:
    """What Triton specialises on: a tensor's dtype and alignment, whether an integer is 1 or a multiple of 16 and how
    wide it is."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return 1 if argument == 1 else (argument % 16 == 0, -(2**31) <= argument < 2**31)
    return type(argument)


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorator: make a Triton kernel of a function."""
    return Kernel(function)
