"""What a CPU process computes with: the native kernels on packed weights, or the references on float32."""

from __future__ import annotations

import os
import sys

from headrace.ops.native.library import available, library, remedy, unavailable_reason
from headrace.ops.native.variants import bind_native, bind_references
from headrace.quant.base import QuantScheme
from headrace.quant.packed import Packed
from headrace.quant.unquantized import Unquantized

_told = False


def bind_cpu(num_threads: int, mode: str = "exact", quantize: str = "none") -> QuantScheme:
    """Bind the ops for this process and return the scheme that stores weights for them. `mode` (quant/packed.py): in
    what numbers weights are multiplied; numpy has float32 only. `quantize` (quant/online.py): ValueError where there
    are no native kernels to read what it makes.

    Without the native library the engine runs on numpy, and that is said once, with the remedy.
    """
    global _told
    if available():
        library().set_num_threads(num_threads)
        bind_native()
        return Packed(mode, quantize)
    if quantize != "none":
        raise ValueError(f"quantize={quantize} needs the native kernels ({unavailable_reason()}); leave it out")
    bind_references()
    if not _told and os.environ.get("HEADRACE_NATIVE", "1") != "0":
        _told = True
        text = f"headrace: {unavailable_reason()}; running on numpy, many times slower. {remedy()}"
        print(text.rstrip(), file=sys.stderr)
    return Unquantized()
