"""The shared library: where it lies, which code path it runs, how its functions are called.

Every function is called through ctypes with plain pointers, strides (in elements) and sizes; the GIL is free meanwhile.
Nothing is checked on the other side: what calls these functions has checked shapes, types and strides.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from headrace.env import NATIVE_LIBRARY
from headrace.ops.native.recording import current

ABI = 11
LIBRARY = NATIVE_LIBRARY
PATHS = ("amx", "avx512", "avx2", "portable")  # best first
EMULATED = "amx-emulated"  # for tests: the amx path on processors that have AVX-512 only; never chosen by itself
REMEDY = "install a C++17 compiler (such as g++) and install Headrace again; HEADRACE_NATIVE=0 silences this"

_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "abi": (_INT, []),
    "select_path": (ctypes.c_char_p, [ctypes.c_char_p]),
    "path_state": (_INT, [ctypes.c_char_p]),
    "set_num_threads": (None, [_INT]),
    "panel_bytes": (ctypes.c_size_t, [_INT, _INT]),
    "pack": (_INT, [_INT, _POINTER, ctypes.c_size_t, _POINTER, _INT, _INT, _POINTER]),
    "unpack_rows": (None, [_INT, _POINTER, _INT, _POINTER, _INT, _POINTER, _SIZE]),
    "linear": (None, [_POINTER, _INT, _INT, _POINTER, _SIZE, _INT, _POINTER, _POINTER, _SIZE, _INT, _INT]),
    "product": (_INT, [_INT, _INT, _INT]),
    "join_strings": (ctypes.c_int64, [_POINTER, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, _POINTER]),
    "gather_rows": (None, [_POINTER, _SIZE, _POINTER, _INT, _POINTER, _INT]),
    "replay": (None, [_POINTER, _INT]),
    "rms_norm": (
        None,
        [_POINTER, _SIZE, _SIZE, _INT, _INT, _POINTER, _POINTER, _SIZE, _SIZE, _INT, _FLOAT],
    ),
    "add_rms_norm": (None, [_POINTER, _SIZE, _POINTER, _SIZE, _INT, _POINTER, _POINTER, _SIZE, _INT, _FLOAT]),
    "rope": (
        None,
        [_POINTER, _SIZE, _SIZE, _INT, _INT, _POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _SIZE, _INT, _INT],
    ),
    "gated": (None, [_INT, _POINTER, _SIZE, _POINTER, _SIZE, _INT, _INT]),
    "uniforms": (None, [ctypes.c_int64, _INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER]),
    "elementwise": (None, [_INT, _POINTER, _SIZE, _POINTER, _SIZE, _FLOAT, _POINTER, _SIZE, _INT, _INT]),
    "attention": (None, [_POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER, _INT, _INT]),
}


class NativeError(RuntimeError):
    """The library is not there, or cannot run here; the message says why. `remedy`: what would help, if known."""

    def __init__(self, message: str, remedy: str = ""):
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True)
class Library:
    """A loaded library: its code path, and its functions under their names without the prefix."""

    path: str
    functions: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.functions[name]
        except KeyError:
            raise AttributeError(name) from None


def open_library(file: Path, path: str = "") -> Library:
    """Load `file` and choose code path `path` (the best that runs here if empty). Raises NativeError.

    The choice belongs to the process: a library that is opened again with another path has that path everywhere.
    """
    try:
        loaded = ctypes.CDLL(str(file))
        functions = {name: getattr(loaded, f"headrace_{name}") for name in _SIGNATURES}
    except (OSError, AttributeError) as error:
        raise NativeError(f"the native CPU kernels cannot be loaded ({error})", REMEDY) from None
    for name, (result, arguments) in _SIGNATURES.items():
        functions[name].restype, functions[name].argtypes = result, arguments
    if functions["abi"]() != ABI:
        raise NativeError(
            f"{file} was built for another version of Headrace", "install Headrace again (in a clone: make demo)"
        )
    chosen = functions["select_path"](path.encode())
    if chosen is None:
        known = f"one of {', '.join(PATHS)}" if path not in (*PATHS, EMULATED) else "something this processor can run"
        raise NativeError(f"HEADRACE_NATIVE_PATH={path}: it must be {known}")
    return Library(chosen.decode(), functions)


@cache
def _opened() -> Library | NativeError:
    if os.environ.get("HEADRACE_NATIVE", "1") == "0":
        return NativeError("switched off by HEADRACE_NATIVE=0")
    if not LIBRARY.exists():
        return NativeError("the native CPU kernels were not built when Headrace was installed", REMEDY)
    try:
        return open_library(LIBRARY, os.environ.get("HEADRACE_NATIVE_PATH", ""))
    except NativeError as error:
        return error


def available() -> bool:
    """Whether the kernels can be used in this process."""
    return isinstance(_opened(), Library)


def unavailable_reason() -> str | None:
    """Why they cannot; None if they can."""
    opened = _opened()
    return None if isinstance(opened, Library) else str(opened)


def remedy() -> str:
    """What would make them usable, as a sentence of its own; "" where the reason says it."""
    opened = _opened()
    return "" if isinstance(opened, Library) else opened.remedy


def library() -> Library:
    """The process's library, or the recording that is being made of its calls. NativeError where there is none."""
    opened = _opened()
    if (recording := current()) is not None and isinstance(opened, Library):
        return Library(opened.path, recording.functions)
    if isinstance(opened, NativeError):
        raise opened
    return opened


def available_paths() -> list[str]:
    """The code paths that run here, best first, the emulated one last. For tests: it ends with the path chosen that was
    chosen before."""
    current = library().path
    found = []
    for path in (*PATHS, EMULATED):
        try:
            found.append(open_library(LIBRARY, path).path)
        except NativeError:
            continue
    open_library(LIBRARY, current)
    return found


PATH_STATES = ("not compiled", "compiled, but this machine cannot run it", "runs here")


def path_states() -> dict[str, str]:
    """Of each code path: one of PATH_STATES. Empty where there is no library."""
    opened = _opened()
    if isinstance(opened, NativeError):
        return {}
    return {path: PATH_STATES[opened.path_state(path.encode())] for path in PATHS}


def address(array: np.ndarray) -> int:
    """Where the array's first element lies. A step asks often, and numpy's `array.ctypes.data` makes an object."""
    return _fast_address(array) if _FAST else array.ctypes.data


def _fast_address(array: np.ndarray) -> int:
    # The data pointer is the first field after the object header (PyArrayObject_fields, part of numpy's ABI).
    return ctypes.c_void_p.from_address(id(array) + _HEADER).value or 0


_HEADER = object.__basicsize__
_PROBE = np.zeros(1)
_FAST = _HEADER == 16 and _fast_address(_PROBE) == _PROBE.ctypes.data
