"""Weights as the file has them, repacked once for the native kernels and decoded in registers (`ops/native/packed`)."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.layers.weights import WeightSource
from headrace.ops.native.packed import FLOATS, Arena, PackedMatrix, StoredTensor, pack, packed_linear
from headrace.ops.xp import Array
from headrace.quant.base import LinearMethod
from headrace.quant.online import quantized


class PackedLinear:
    """One packed matrix per layer.

    Arithmetic in float32: a weight is decoded, then multiplied and added. With `int16` and a quantised format: inputs
    are rounded to 16-bit integers, blocks of 32 products are summed exactly, and the rest is float32.
    """

    input_quant: str | None = None

    def __init__(self, int16: bool = False, quantize: str = "none", arena: Arena | None = None) -> None:
        """`quantize`: what becomes of weights that are stored as floats (quant/online.py)."""
        self._int16 = int16
        self._quantize = quantize
        self._arena = arena or Arena()

    def create(self, source: WeightSource, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> PackedMatrix:
        try:
            parts = [source.take_stored(name, shape) for name, shape in zip(names, shapes, strict=True)]
            return self.packed(parts, shapes[0][1])
        except ValueError as error:
            for name, shape in zip(names, shapes, strict=True):
                source.take(name, shape)  # the checkpoint's own reader names the file and the tensor at fault
            raise ValueError(f"{', '.join(names)}: {error}") from None

    def packed(self, parts: Sequence[StoredTensor], in_size: int) -> PackedMatrix:
        """One matrix [sum of N, in_size] of `parts`, one below the other; ValueError says what is wrong with them."""
        return pack([self._quantized(part) for part in parts], in_size, self._arena, self._int16)

    def _quantized(self, stored: StoredTensor) -> StoredTensor:
        if self._quantize == "none":
            return stored
        if stored.format not in FLOATS:
            raise ValueError(f"is quantised already, as {stored.format}; leave out quantize")
        made = quantized(stored.floats(), self._quantize)
        if stored.release is not None:
            stored.release()
        return made

    def apply(self, weights: PackedMatrix, x: Array, bias: Array | None, out: Array | None = None) -> Array:
        return packed_linear(x, weights, bias, out=out)

    def rows(self, weights: PackedMatrix, ids: Array) -> Array:
        return weights.rows(ids)

    def num_bytes(self, weights: PackedMatrix) -> int:
        return weights.nbytes


class Packed:
    """Every layer, the embedding and the head packed."""

    name = "packed"

    def __init__(self, int16: bool = False, quantize: str = "none") -> None:
        arena = Arena()
        self._method = PackedLinear(int16, quantize, arena)
        self._vocabulary = self._method if quantize == "none" else PackedLinear(int16, "q8", arena)
        self._plain = self._method if quantize == "none" else PackedLinear(int16, "none", arena)

    def expert(self, parts: Sequence[StoredTensor], in_size: int) -> PackedMatrix:
        """One expert's matrix [sum of N, in_size] of `parts`, one below the other, for `product`."""
        return self._method.packed(parts, in_size)

    product = staticmethod(packed_linear)

    def linear(self, name: str) -> LinearMethod:
        if name.endswith((".gate", ".router")):  # of experts: small, and a wrong expert is worse than a rounded one
            return self._plain
        return self._vocabulary if name in ("model.embed_tokens", "lm_head") else self._method
