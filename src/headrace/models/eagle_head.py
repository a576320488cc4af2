"""What every head that continues a model's features can do: those of EAGLE (models/draft_heads.py says what their
entries are), and modules for multi-token prediction (models/mtp.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from headrace.attention.base import LayerAttention
from headrace.layers.attention import Attend
from headrace.layers.rope import RotaryEmbedding
from headrace.models.draft_vocab import DraftVocabulary
from headrace.models.spec import ModelSpec
from headrace.ops.xp import Array


class EagleHead(ABC):
    """A head that continues the features of a model, `target`."""

    taps: tuple[int, ...] = ()  # layers of the model before which its residual stream is a feature; (): the last state
    spec: ModelSpec
    rotary: RotaryEmbedding
    vocabulary: DraftVocabulary | None = None  # the tokens that it scores; None: all

    @property
    @abstractmethod
    def attention_layers(self) -> list[LayerAttention]:
        """What its layer asks of attention."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes that a pass reads."""

    @abstractmethod
    def fuse(self, features: Array) -> Array:
        """The model's features [T, F] as the head's [T, H]."""

    @abstractmethod
    def forward(self, token_ids: Array, features: Array, positions: Array, attend: Attend) -> tuple[Array, Array]:
        """(features [T, H] that follow, hidden states [T, H] for `scores`) of entries [T]."""

    @abstractmethod
    def scores(self, hidden: Array) -> Array:
        """Scores of the tokens of `vocabulary`, float32 [L, N], of hidden states [L, H]."""

    def logits(self, hidden: Array) -> Array:
        """Scores of the model's tokens, float32 [L, V], of hidden states [L, H]; -inf for those it never drafts."""
        scores = self.scores(hidden)
        return scores if self.vocabulary is None else self.vocabulary.spread(scores)
