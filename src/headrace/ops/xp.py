"""The array subset that references are written in: the Python array API, plus the few things it lacks.

numpy (2.1 and newer) and torch (through array-api-compat) both serve it. Nothing here is on a GPU's hot path.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or torch.Tensor


def namespace(x: Array) -> Any:
    """The array-API namespace of `x`; numpy itself for numpy arrays."""
    if isinstance(x, np.ndarray):
        return np
    from array_api_compat import array_namespace

    return array_namespace(x)


def fresh(x: Array) -> Array:
    """A float32 copy of `x`, where `x` is."""
    xp = namespace(x)
    return xp.asarray(x, dtype=xp.float32, copy=True)


def emit(result: Array, out: Array | None) -> Array:
    """Return `result`, copied into `out` if the caller gave a buffer."""
    if out is None:
        return result
    out[...] = result
    return out
