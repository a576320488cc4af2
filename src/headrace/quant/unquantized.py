"""Weights as float32, multiplied as they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace import ops
from headrace.layers.weights import WeightSource
from headrace.ops.xp import Array
from headrace.quant.base import LinearMethod


class UnquantizedLinear:
    """One float32 matrix [sum of out, in] per layer."""

    input_quant: str | None = None

    def create(self, source: WeightSource, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> np.ndarray:
        if len(names) == 1:
            return np.ascontiguousarray(source.take(names[0], shapes[0]), np.float32)
        merged = np.empty((sum(rows for rows, _ in shapes), shapes[0][1]), np.float32)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            merged[start : start + shape[0]] = source.take(name, shape)
            start += shape[0]
        return merged

    def apply(self, weights: Array, x: Array, bias: Array | None, out: Array | None = None) -> Array:
        return ops.linear(x, weights, bias, out=out)

    def rows(self, weights: Array, ids: Array) -> Array:
        return ops.embedding(ids, weights)

    def num_bytes(self, weights: Array) -> int:
        return int(weights.nbytes)


class Unquantized:
    """Every layer in float32."""

    name = "none"

    def __init__(self) -> None:
        self._method = UnquantizedLinear()

    def linear(self, name: str) -> LinearMethod:
        return self._method
