"""Multi-token prediction (DeepSeek-V3 report, 2024, section 2.2): a module trained with the model, used as a head that
continues its features.

    eh_proj([enorm(embedding of token i + 1), hnorm(feature of position i)]) -> decoder layer -> norm -> output head

The feature is the last hidden state, normed, and so is what the module makes for its own next step. Its layer is one of
the model's family; its head is the model's unless the checkpoint has another.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace import ops
from headrace.attention.base import LayerAttention
from headrace.layers.attention import Attend
from headrace.layers.embedding import Embedding, LMHead
from headrace.layers.linear import Linear, Shard
from headrace.layers.rope import RotaryEmbedding
from headrace.models.blocks import CausalLM, DecoderLayer, Parts
from headrace.models.eagle_head import EagleHead
from headrace.ops.xp import Array


class MtpHead(EagleHead):
    """One module, which drafts any number of tokens by continuing itself."""

    def __init__(
        self,
        parts: Parts,
        target: CausalLM,
        layer: Callable[[Parts, int], DecoderLayer],
        feature_first: bool = False,
    ):
        """`layer` builds the family's layers; `feature_first`: eh_proj takes the feature before the embedding."""
        spec, source = parts.spec, parts.source
        self.spec, self.target, self.embedding = spec, target, target.embedding
        self.rotary = RotaryEmbedding(spec.rope, spec.head_dim, spec.max_position)
        self.embedding_norm, self.feature_norm = parts.norm("enorm"), parts.norm("hnorm")
        self.project = Linear(source, Shard("eh_proj", spec.hidden_size), 2 * spec.hidden_size, parts.scheme)
        self.layer = layer(parts, 0)
        self.norm = parts.norm("norm")
        self.head = target.head
        if "head.weight" in source:
            own = Embedding.__new__(Embedding)  # the shape and the method that an untied head takes over
            own.method, own.shape = parts.scheme.linear("lm_head"), (spec.vocab_size, spec.hidden_size)
            self.head = LMHead(source, "head.weight", own, tied=False, soft_cap=spec.logit_soft_cap)
        self._feature_first = feature_first

    @property
    def attention_layers(self) -> list[LayerAttention]:
        return [self.layer.attention.settings]

    @property
    def weight_bytes(self) -> int:
        """Bytes that a pass reads."""
        return self.project.weight_bytes + self.layer.weight_bytes + int(self.head.weight.nbytes)

    def fuse(self, features: Array) -> Array:
        return features

    def forward(self, token_ids: Array, features: Array, positions: Array, attend: Attend) -> tuple[Array, Array]:
        both = [self.embedding_norm(self.embedding(token_ids)), self.feature_norm(features)]
        first, second = both[::-1] if self._feature_first else both
        residual = ops.copied(self.project(ops.joined(first, second)))
        update = self.layer(self.layer.before_attention(residual), residual, self.rotary.at(positions), attend)
        hidden, _ = self.norm.add(update, residual)
        return hidden, hidden

    def scores(self, hidden: Array) -> Array:
        return self.head(hidden)
