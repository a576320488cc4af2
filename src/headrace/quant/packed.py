"""Weights as the file has them, repacked once for the native kernels and decoded in registers (`ops/native/packed`)."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.layers.weights import WeightSource
from headrace.ops.native.packed import Arena, PackedMatrix, pack, packed_linear
from headrace.ops.xp import Array
from headrace.quant.base import LinearMethod


class PackedLinear:
    """One packed matrix per layer.

    Arithmetic in float32: a weight is decoded, then multiplied and added. With `int16` and a quantised format: inputs
    are rounded to 16-bit integers, blocks of 32 products are summed exactly, and the rest is float32.
    """

    input_quant: str | None = None

    def __init__(self, int16: bool = False) -> None:
        self._int16 = int16
        self._arena = Arena()

    def create(self, source: WeightSource, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> PackedMatrix:
        parts = [source.take_stored(name, shape) for name, shape in zip(names, shapes, strict=True)]
        try:
            return pack(parts, shapes[0][1], self._arena, self._int16)
        except ValueError as error:
            for name, shape in zip(names, shapes, strict=True):
                source.take(name, shape)  # the checkpoint's own reader names the file and the tensor at fault
            raise ValueError(f"{', '.join(names)}: {error}") from None

    def apply(self, weights: PackedMatrix, x: Array, bias: Array | None, out: Array | None = None) -> Array:
        return packed_linear(x, weights, bias, out=out)

    def rows(self, weights: PackedMatrix, ids: Array) -> Array:
        return weights.rows(ids)

    def num_bytes(self, weights: PackedMatrix) -> int:
        return weights.nbytes


class Packed:
    """Every layer, the embedding and the head packed."""

    name = "packed"

    def __init__(self, int16: bool = False) -> None:
        self._method = PackedLinear(int16)

    def linear(self, name: str) -> LinearMethod:
        return self._method
