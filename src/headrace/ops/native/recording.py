"""Recording: a forward pass as a flat list of native calls that is replayed in one.

A pass over a few tokens is some 300 calls from Python, which cost more time than the arithmetic of a small model. While
a pass is recorded, each call is made and written down with its arguments; their addresses are good for ever after,
because outputs come from buffers that the recording keeps. A buffer is used again within the pass as soon as nothing
refers to it, so a recording needs a few layers' worth of memory and no plan of lifetimes: Python's reference counts are
the plan.

What cannot be replayed ends a recording: an op that is bound to its reference, an array that had to be converted, a
result that no native call made. Array arithmetic beside the ops would go unseen, and layers have none.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.ops.registry import all_ops

# The codes of csrc/replay.cpp.
CODES = {
    name: code
    for code, name in enumerate(
        (
            "linear",
            "rms_norm",
            "add_rms_norm",
            "rope",
            "gated",
            "attention",
            "unpack_rows",
            "gather_rows",
            "elementwise",
        )
    )
}
MAX_ARGUMENTS = 13
_PROBE = [np.empty(1)]
_IDLE = sys.getrefcount(_PROBE[0])  # references to a buffer that only a list holds


class _Call(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int64), ("arguments", ctypes.c_int64 * MAX_ARGUMENTS)]


class Recording:
    """The calls of one pass, and everything that their addresses point to."""

    def __init__(self, functions: dict[str, Any]):
        self.functions = dict(functions)
        self.sound = True  # everything that happened can be replayed
        self.position_limit = sys.maxsize  # tables that are looked up by position have so many rows
        self._real = functions
        self._calls: list[_Call] = []
        self._buffers: list[np.ndarray] = []
        self._kept: list[Any] = []
        self._tape: Any = None
        for name, code in CODES.items():
            self.functions[name] = self._recorded(functions[name], code)

    def _recorded(self, function: Any, code: int) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            function(*arguments)
            self._calls.append(_Call(code, (ctypes.c_int64 * MAX_ARGUMENTS)(*map(_as_int64, arguments))))

        return call

    def keep(self, thing: Any) -> None:
        """Hold what a recorded address points to."""
        self._kept.append(thing)

    def empty(self, shape: tuple[int, ...]) -> np.ndarray:
        """A float32 buffer that nobody refers to."""
        for index in range(len(self._buffers)):
            if self._buffers[index].shape == shape and sys.getrefcount(self._buffers[index]) == _IDLE:
                return self._buffers[index]
        self._buffers.append(np.empty(shape, np.float32))
        return self._buffers[-1]

    def owns(self, array: Any) -> bool:
        """Whether `array` is one of the buffers, or a view of one: something that a replay fills."""
        while isinstance(array, np.ndarray) and array.base is not None:
            array = array.base
        return any(array is buffer for buffer in self._buffers)

    def finish(self) -> None:
        """No more calls come."""
        self._tape = (_Call * len(self._calls))(*self._calls)

    def replay(self) -> None:
        """Make every call again."""
        self._real["replay"](ctypes.addressof(self._tape), len(self._tape))


def _as_int64(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, float):
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value)


_current: Recording | None = None


def current() -> Recording | None:
    """The recording that is being made, if any."""
    return _current


def unrecordable() -> None:
    """What happens now could not be replayed."""
    if _current is not None:
        _current.sound = False


def empty(shape: tuple[int, ...]) -> np.ndarray:
    """float32 memory for an op's output."""
    return np.empty(shape, np.float32) if _current is None else _current.empty(shape)


def keep(thing: Any) -> None:
    """Called for what an op takes the address of and the model does not hold."""
    if _current is not None:
        _current.keep(thing)


def record(functions: dict[str, Any], run: Callable[[], Any]) -> tuple[Any, Recording | None]:
    """(result of run(), an array or a tuple of them; its recording, None if it cannot be replayed). `functions` are the
    library's own."""
    global _current
    recording = Recording(functions)
    before = [(op, op.impl) for op in all_ops() if op.bound == "reference"]
    for op, implementation in before:
        op.impl = _betraying(implementation)
    _current = recording
    try:
        result = run()
    finally:
        _current = None
        for op, implementation in before:
            op.impl = implementation
    results = result if isinstance(result, tuple) else (result,)
    if not recording.sound or not all(recording.owns(each) for each in results):
        return result, None
    recording.keep(result)
    recording.finish()
    return result, recording


def _betraying(implementation: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        unrecordable()
        return implementation(*arguments, **keywords)

    return call
