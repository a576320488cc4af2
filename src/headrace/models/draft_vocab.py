"""The tokens that a draft head scores: all of the model's, or the fewer that the tensor `d2t` names (EAGLE-3; `d2t`
holds each one's distance from its place to the model's id)."""

from __future__ import annotations

import numpy as np

from headrace.layers.weights import WeightSource
from headrace.ops.xp import Array, namespace


class DraftVocabulary:
    """Brings scores of a head's tokens to the model's."""

    def __init__(self, source: WeightSource, size: int, vocab_size: int):
        """`size` tokens have scores, the model has `vocab_size`. ValueError if d2t names others."""
        self.size, self.vocab_size = size, vocab_size
        self.ids: Array | None = None  # of the model's tokens, int64 [size]; None: the same
        if "d2t" in source:
            ids = np.arange(size) + source.take("d2t", (size,)).astype(np.int64)
            if ids.min() < 0 or ids.max() >= vocab_size:
                raise ValueError("d2t names tokens that the model does not have")
            self.ids = source.place(ids)
        source.ignore("t2d")

    def spread(self, scores: Array) -> Array:
        """Scores float32 [L, vocab_size] of scores [L, size]; -inf for tokens that are never drafted."""
        if self.ids is None:
            return scores
        xp = namespace(scores)
        full = xp.full((scores.shape[0], self.vocab_size), -xp.inf, dtype=xp.float32, device=scores.device)
        full[:, self.ids] = scores
        return full
