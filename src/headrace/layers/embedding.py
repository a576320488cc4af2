"""Token embedding and output head."""

from __future__ import annotations

from headrace import ops
from headrace.layers.weights import WeightSource
from headrace.ops.xp import Array
from headrace.quant.base import LinearMethod


class Embedding:
    """One vector per token id, multiplied by `scale`; stored by `method` as a linear layer's weight is, so that a tied
    head shares it."""

    def __init__(
        self,
        source: WeightSource,
        name: str,
        vocab_size: int,
        hidden_size: int,
        method: LinearMethod,
        scale: float = 1.0,
    ):
        self.scale = scale
        self.method = method
        self.shape = (vocab_size, hidden_size)
        self.weight = method.create(source, [name], [self.shape])

    def __call__(self, token_ids: Array) -> Array:
        """token_ids [T] -> float32 [T, H], fresh memory."""
        vectors = self.method.rows(self.weight, token_ids)
        return vectors if self.scale == 1.0 else ops.scale(vectors, self.scale, out=vectors)


class LMHead:
    """Scores of every token: the embedding's own matrix if `tied`, whatever the checkpoint holds beside it.

    With a `soft_cap` no score leaves -cap .. cap.
    """

    def __init__(
        self, source: WeightSource, name: str, embedding: Embedding, tied: bool, soft_cap: float | None = None
    ):
        self.tied = tied
        self.method = embedding.method
        self.soft_cap = soft_cap
        if tied:
            source.ignore(name)
            self.weight = embedding.weight
        else:
            self.weight = self.method.create(source, [name], [embedding.shape])

    def __call__(self, hidden: Array, out: Array | None = None) -> Array:
        """hidden [L, H] -> float32 [L, V]."""
        exact = getattr(self.method, "logits", None)  # of a method whose results are not float32 elsewhere
        logits = self.method.apply(self.weight, hidden, None, out) if exact is None else exact(self.weight, hidden)
        return logits if self.soft_cap is None else ops.soft_cap(logits, self.soft_cap, out=logits)
