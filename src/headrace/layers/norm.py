"""RMSNorm layers, and the null object that stands where there is none."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from headrace import ops
from headrace.layers.weights import WeightSource
from headrace.ops.xp import Array


class Norm(Protocol):
    """What a decoder layer knows of a norm; NoNorm where a family has none."""

    @property
    def num_parameters(self) -> int: ...

    def __call__(self, x: Array, out: Array | None = None) -> Array:
        """x [..., size] normalised over the last axis; may be x itself."""
        ...

    def add(self, x: Array, residual: Array) -> tuple[Array, Array]:
        """(norm(residual + x), residual + x); `residual` is overwritten with the sum."""
        ...


class RMSNorm:
    """Root-mean-square normalisation with a learned scale [size], stored as the scale less `offset`."""

    def __init__(self, source: WeightSource, name: str, size: int, eps: float, offset: float = 0.0):
        self.weight: Array = np.ascontiguousarray(source.take(name, (size,)), np.float32)
        if offset:
            self.weight = self.weight + np.float32(offset)
        self.weight = source.place(self.weight)
        self.size = size
        self.eps = eps

    @property
    def num_parameters(self) -> int:
        return self.size

    def __call__(self, x: Array, out: Array | None = None) -> Array:
        """See Norm; `out` may be x."""
        return ops.rms_norm(x, self.weight, self.eps, out=out)

    def add(self, x: Array, residual: Array) -> tuple[Array, Array]:
        """See Norm."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class NoNorm:
    """The place of a norm in a family that has none there: nothing changes but the residual sum."""

    num_parameters = 0

    def __call__(self, x: Array, out: Array | None = None) -> Array:
        return x

    def add(self, x: Array, residual: Array) -> tuple[Array, Array]:
        """(residual + x, residual + x): one and the same array, `residual` overwritten."""
        residual = ops.add(residual, x, out=residual)
        return residual, residual
