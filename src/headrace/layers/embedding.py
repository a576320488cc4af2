"""Token embedding and output head."""

from __future__ import annotations

import numpy as np

from headrace import ops
from headrace.layers.weights import WeightSource
from headrace.ops.xp import Array


class Embedding:
    """One vector per token id."""

    def __init__(self, source: WeightSource, name: str, vocab_size: int, hidden_size: int):
        self.weight = np.ascontiguousarray(source.take(name, (vocab_size, hidden_size)), np.float32)

    def __call__(self, token_ids: Array) -> Array:
        """token_ids [T] -> float32 [T, H], fresh memory."""
        return ops.embedding(token_ids, self.weight)


class LMHead:
    """Scores of every token: the embedding's own matrix if `tied`, whatever the checkpoint holds beside it."""

    def __init__(self, source: WeightSource, name: str, embedding: Embedding, tied: bool):
        self.tied = tied
        if tied:
            source.ignore(name)
            self.weight = embedding.weight
        else:
            self.weight = np.ascontiguousarray(source.take(name, embedding.weight.shape), np.float32)

    def __call__(self, hidden: Array, out: Array | None = None) -> Array:
        """hidden [L, H] -> float32 [L, V]."""
        return ops.linear(hidden, self.weight, out=out)
