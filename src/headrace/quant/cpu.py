"""What a CPU process computes with: the native kernels on packed weights, or the references on float32."""

from __future__ import annotations

import os
import sys

from headrace.ops.native.library import available, library, remedy, unavailable_reason
from headrace.ops.native.packed import product
from headrace.ops.native.variants import bind_native, bind_references
from headrace.quant.base import QuantScheme
from headrace.quant.packed import Packed
from headrace.quant.unquantized import Unquantized

_told: set[str] = set()  # what this process has been told, once


def bind_cpu(num_threads: int, mode: str = "exact", quantize: str = "none", group: int = 32) -> QuantScheme:
    """Bind the ops for this process and return the scheme that stores weights for them. `mode` (quant/packed.py): in
    what numbers weights are multiplied; numpy has float32 only. `quantize`, `group` to a scale (quant/online.py):
    ValueError where there are no native kernels to read what it makes.

    Without the native library the engine runs on numpy, and that is said once, with the remedy.
    """
    if available():
        library().set_num_threads(num_threads)
        bind_native()
        same = all(product(mode, "Q4_1", tokens) == product("default", "Q4_1", tokens) for tokens in (1, 64))
        if mode in ("fast", "int8") and same:
            path = library().path
            _tell(f"headrace: mode={mode} is the same as mode=default on this processor (code path {path})")
        return Packed(mode, quantize, group)
    if quantize != "none":
        raise ValueError(f"quantize={quantize} needs the native kernels ({unavailable_reason()}); leave it out")
    bind_references()
    if os.environ.get("HEADRACE_NATIVE", "1") != "0":
        _tell(f"headrace: {unavailable_reason()}; running on numpy, many times slower. {remedy()}".rstrip())
    return Unquantized()


def _tell(text: str) -> None:
    if text not in _told:
        _told.add(text)
        print(text, file=sys.stderr)
