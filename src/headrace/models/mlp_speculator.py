"""MLP speculator (Wertheimer et al. 2024): heads of a small recurrent network over the model's last hidden state.

    state 0     the last hidden state [E]; with scale_input normed, over sqrt 2
    state i + 1 gelu(norm i(project i(state i) + w * embed i(token i)))     token 0: the one that the model drew
    draft i     from head i(state i + 1)

w = sqrt((1 - s^2) I / 2) / s with s = 2^(-1 / 2n) for n heads of I inner numbers, so that what the state holds of
earlier tokens fades evenly. Norms divide by the root of the mean square, then scale and shift. Published as model type
`mlp_speculator`: tensors `emb.i`, `proj.i`, `ln.i` and `head.i` behind `speculator.`; those that are not there are
shared with the one before (`tie_weights`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from headrace import ops
from headrace.layers.embedding import Embedding
from headrace.layers.linear import Linear, Shard
from headrace.layers.weights import WeightSource
from headrace.models.blocks import CausalLM
from headrace.ops.xp import Array, namespace
from headrace.quant.base import QuantScheme

_EPS = 1e-6
_T = TypeVar("_T")


@dataclass(frozen=True)
class MlpKind:
    """Sizes of a speculator."""

    num_heads: int
    state_size: int  # of the model
    inner_size: int
    vocab_size: int
    scale_input: bool


class MlpSpeculator:
    """All heads of one model; see spec/state_heads.py for how they are called."""

    def __init__(self, source: WeightSource, scheme: QuantScheme, target: CausalLM, kind: MlpKind):
        """ValueError if it is for a model of another hidden size."""
        if kind.state_size != target.spec.hidden_size:
            raise ValueError(
                f"the speculator reads states of {kind.state_size} numbers, not of {target.spec.hidden_size}"
            )
        self.num_heads, self._scale_input = kind.num_heads, kind.scale_input
        inner, vocab = kind.inner_size, kind.vocab_size
        fade = 0.5 ** (0.5 / kind.num_heads)
        self._weight = math.sqrt((1 - fade**2) * inner / 2) / fade

        def linear(name: str, out_size: int, in_size: int) -> Linear:
            return Linear(source, Shard(name, out_size), in_size, scheme)

        self._embeddings: list[Embedding] = []
        self._projections: list[Linear] = []
        self._norms: list[tuple[Array, Array]] = []
        self._outputs: list[Linear] = []
        for head in range(kind.num_heads):
            in_size = inner if head else kind.state_size
            if head == 0 or f"emb.{head}.weight" in source:
                method = scheme.linear("embed_tokens")
                self._embeddings.append(Embedding(source, f"emb.{head}.weight", vocab, inner, method))
            if head <= 1 or f"proj.{head}.weight" in source:
                self._projections.append(linear(f"proj.{head}", inner, in_size))
            if head == 0 or f"ln.{head}.weight" in source:
                scale, shift = (source.take(f"ln.{head}.{part}", (inner,)) for part in ("weight", "bias"))
                self._norms.append((source.place(_float(scale)), source.place(_float(shift))))
            if head == 0 or f"head.{head}.weight" in source:
                self._outputs.append(linear(f"head.{head}", vocab, inner))

    @property
    def weight_bytes(self) -> int:
        """Bytes that a pass of one head reads, on average."""
        layers = [*self._projections, *self._outputs]
        return sum(layer.weight_bytes for layer in layers) // len(layers) * 2

    def draft(self, head: int, states: Array, token_ids: Array) -> tuple[Array, Array]:
        """(logits float32 [R, V], states [R, I] for the next head) of states [R, E or I] and the tokens [R] before."""
        xp = namespace(states)
        x = xp.asarray(states, dtype=xp.float32)
        if head == 0 and self._scale_input:
            x = _normed(x) * math.sqrt(0.5)
        embedded = _own(self._embeddings, head)(xp.asarray(token_ids, dtype=xp.int32))
        x = xp.asarray(_own(self._projections, head)(x), dtype=xp.float32) + self._weight * embedded
        scale, shift = _own(self._norms, head)
        x = _normed(x) * scale + shift
        x = xp.asarray(ops.gelu_mul(xp.concat([x, xp.ones_like(x)], axis=1)), dtype=xp.float32)
        return _own(self._outputs, head).scores(x), x


def _float(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32)


def _own(layers: list[_T], head: int) -> _T:
    return layers[min(head, len(layers) - 1)]


def _normed(x: Array) -> Array:
    xp = namespace(x)
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + _EPS)
