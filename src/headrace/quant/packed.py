"""Weights as the file has them, repacked once for the native kernels and decoded in registers (`ops/native/packed`)."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.layers.weights import WeightSource
from headrace.ops.native.packed import FLOATS, Arena, PackedMatrix, StoredTensor, pack, packed_gated, packed_linear
from headrace.ops.registry import Op
from headrace.ops.xp import Array
from headrace.quant.base import LinearMethod
from headrace.quant.online import quantized


class PackedLinear:
    """One packed matrix per layer.

    `mode` exact: a weight is decoded, then multiplied and added in float32. default, on the AMX path: inputs and
    weights are rounded to bfloat16, sums are float32, and only F32 matrices are left as they are; on other paths inputs
    of quantised formats are rounded to 16-bit integers, blocks of 32 products are summed exactly, and the rest is
    float32. fast: as default, but for up to 4 tokens the AMX path, too, rounds to 16-bit integers. int8: inputs of
    quantised formats are rounded to bytes, 32 under one scale (portable path: as default).
    """

    input_quant: str | None = None

    def __init__(
        self,
        mode: str = "exact",
        quantize: str = "none",
        arena: Arena | None = None,
        *,
        group: int = 32,
        floats_exact: bool = False,
    ) -> None:
        """`quantize`: what becomes of weights that are stored as floats, `group` to a scale (quant/online.py).
        `floats_exact`: those that stay floats are multiplied in float32 in every mode."""
        self._group = group
        self._floats_exact = floats_exact
        self._mode = mode
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
        plain = self._floats_exact and all(part.format in FLOATS for part in parts)
        return pack([self._quantized(part) for part in parts], in_size, self._arena, "exact" if plain else self._mode)

    def _quantized(self, stored: StoredTensor) -> StoredTensor:
        if self._quantize == "none":
            return stored
        if stored.format not in FLOATS:
            raise ValueError(f"is quantised already, as {stored.format}; leave out quantize")
        made = quantized(stored.floats(), self._quantize, self._group)
        if stored.release is not None:
            stored.release()
        return made

    def apply(self, weights: PackedMatrix, x: Array, bias: Array | None, out: Array | None = None) -> Array:
        return packed_linear(x, weights, bias, out=out)

    def apply_gated(self, weights: PackedMatrix, x: Array, bias: Array | None, activation: Op) -> Array:
        return packed_gated(x, weights, activation, bias)

    def rows(self, weights: PackedMatrix, ids: Array) -> Array:
        return weights.rows(ids)

    def num_bytes(self, weights: PackedMatrix) -> int:
        return weights.nbytes


class Packed:
    """Every layer, the embedding and the head packed."""

    name = "packed"

    def __init__(self, mode: str = "exact", quantize: str = "none", group: int = 32) -> None:
        arena = Arena()
        self._method = PackedLinear(mode, quantize, arena, group=group)
        self._vocabulary = self._method if quantize == "none" else PackedLinear(mode, "q8", arena, group=group)
        self._plain = PackedLinear(mode, "none", arena, floats_exact=True)

    def expert(self, parts: Sequence[StoredTensor], in_size: int) -> PackedMatrix:
        """One expert's matrix [sum of N, in_size] of `parts`, one below the other, for `product`."""
        return self._method.packed(parts, in_size)

    product = staticmethod(packed_linear)

    def linear(self, name: str) -> LinearMethod:
        if name.endswith((".gate", ".router")):  # of experts: small, and a wrong expert is worse than a rounded one
            return self._plain
        return self._vocabulary if name in ("model.embed_tokens", "lm_head") else self._method
