"""Weights as one GPU tensor a layer, in the dtype that the model computes in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.layers.weights import WeightSource
from headrace.ops.registry import Op
from headrace.ops.triton import pointwise
from headrace.ops.triton.runtime import RUNTIME
from headrace.ops.triton.skinny import MAX_TOKENS, invariant_tile, skinny_gated, skinny_linear, wide_tile
from headrace.quant.base import LinearMethod


@dataclass(frozen=True)
class DenseMatrix:
    """A weight [out, in] on the GPU."""

    weight: torch.Tensor

    @property
    def size(self) -> int:
        return self.weight.numel()

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class DenseLinear:
    """Few tokens: our own kernels, bound by reading the weight. Many, and float32: the library's product."""

    input_quant: str | None = None

    def __init__(self, device: torch.device, dtype: torch.dtype, max_skinny: int = MAX_TOKENS):
        self._device, self._dtype = device, dtype
        self._max_skinny = max_skinny if dtype != torch.float32 else 0

    def create(self, source: WeightSource, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> DenseMatrix:
        weight = torch.empty((sum(rows for rows, _ in shapes), shapes[0][1]), dtype=self._dtype, device=self._device)
        start = 0
        for name, (rows, _) in zip(names, shapes, strict=True):
            source.fill(name, weight[start : start + rows])
            start += rows
        return DenseMatrix(weight)

    def apply(
        self, weights: DenseMatrix, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See LinearMethod; the result has the model's dtype."""
        result = self._product(weights.weight, x, bias, self._dtype, parts=False)
        return result if out is None else out.copy_(result)

    def apply_partial(self, weights: DenseMatrix, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As `apply`, or float32 [parts, T, out] whose sum it is."""
        return self._product(weights.weight, x, bias, self._dtype, parts=True)

    def apply_gated(
        self, weights: DenseMatrix, x: torch.Tensor, bias: torch.Tensor | None, activation: Op
    ) -> torch.Tensor:
        """activation(gate, up) [T, out / 2] of a merged gate and up."""
        kind = pointwise.KINDS.get(activation.name)
        tokens, (rows, inner) = x.shape[0], weights.weight.shape
        if kind is None or RUNTIME.invariant or not tokens or not self._max_skinny:
            return activation(self.apply(weights, x, bias))
        tile = wide_tile(tokens, rows // 2, inner, "gated")
        if tokens > self._max_skinny and tile is None:
            return activation(self.apply(weights, x, bias))
        return skinny_gated(x, weights.weight, bias, kind, tile)

    def logits(self, weights: DenseMatrix, x: torch.Tensor) -> torch.Tensor:
        """As `apply`, float32: scores closer than the model's dtype can tell apart are kept apart."""
        return self._product(weights.weight, x, None, torch.float32, parts=False)

    def rows(self, weights: DenseMatrix, ids: torch.Tensor) -> torch.Tensor:
        return pointwise.embedding_rows(ids, weights.weight)

    def num_bytes(self, weights: DenseMatrix) -> int:
        return weights.nbytes

    def _product(
        self, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, parts: bool
    ) -> torch.Tensor:
        x = x.to(weight.dtype)  # what a head continues may be float32
        tokens, (rows, inner) = x.shape[0], weight.shape
        if RUNTIME.invariant and tokens:
            return skinny_linear(x, weight, bias, dtype, parts, invariant_tile(tokens, rows, inner, parts))
        if 0 < tokens <= self._max_skinny:
            return skinny_linear(x, weight, bias, dtype, parts)
        if self._max_skinny and (tile := wide_tile(tokens, rows, inner, "parts" if parts else "plain")):
            return skinny_linear(x, weight, bias, dtype, parts, tile)
        if dtype != weight.dtype and weight.is_cuda:
            return torch.mm(x, weight.T, out_dtype=dtype)
        if bias is not None:
            return torch.addmm(bias.to(weight.dtype), x, weight.T).to(dtype)
        return torch.mm(x, weight.T).to(dtype)


class Dense:
    """Every layer, the embedding and the head in one dtype."""

    name = "dense"

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._device, self._dtype = device, dtype
        self._method = DenseLinear(device, dtype)

    def linear(self, name: str) -> LinearMethod:
        return self._method

    def experts(self, weights: np.ndarray) -> torch.Tensor:
        """See layers.moe.ExpertDevice."""
        return self.experts_memory(weights.shape).copy_(torch.from_numpy(weights))

    def experts_memory(self, shape: tuple[int, ...]) -> torch.Tensor:
        """See layers.moe.ExpertDevice."""
        return torch.empty(shape, dtype=self._dtype, device=self._device)
