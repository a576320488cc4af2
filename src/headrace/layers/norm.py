"""RMSNorm layers."""

from __future__ import annotations

import numpy as np

from headrace import ops
from headrace.layers.weights import WeightSource
from headrace.ops.xp import Array


class RMSNorm:
    """Root-mean-square normalisation with a learned scale [size]."""

    def __init__(self, source: WeightSource, name: str, size: int, eps: float):
        self.weight = np.ascontiguousarray(source.take(name, (size,)), np.float32)
        self.eps = eps

    def __call__(self, x: Array, out: Array | None = None) -> Array:
        """x [..., size] normalised over the last axis; `out` may be x."""
        return ops.rms_norm(x, self.weight, self.eps, out=out)

    def add(self, x: Array, residual: Array) -> tuple[Array, Array]:
        """(norm(residual + x), residual + x); `residual` is overwritten with the sum."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
