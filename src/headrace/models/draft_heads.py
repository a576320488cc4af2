"""EAGLE heads: a decoder layer that continues a model's features (Li et al. 2024; EAGLE-3: Li et al. 2025).

Entry i of a head's sequence is the pair (feature of position i, token of position i + 1); what comes out stands for the
feature of position i + 1, from which the token of position i + 2 is drawn. On known text features are the model's own,
beyond it the head's.

    EAGLE-1, -2  feature: the last hidden state, normed. fc([embedding, feature]) -> layer -> the model's own output
                 head. The layer has no norm before its attention.
    EAGLE-3      feature: fc of the residual streams before three layers. The layer's attention sees [norm(embedding),
                 norm(feature)]; a norm and a head follow, often over fewer tokens (d2t: distance to the model's id).
                 Some take the last hidden state, normed, in place of three layers, and have no fc.
"""

from __future__ import annotations

from headrace import ops
from headrace.attention.base import LayerAttention
from headrace.layers.attention import Attend
from headrace.layers.embedding import Embedding, LMHead
from headrace.layers.linear import Linear, Shard
from headrace.layers.norm import NoNorm
from headrace.layers.rope import RotaryEmbedding
from headrace.models.blocks import CausalLM, DecoderLayer, Parts
from headrace.models.draft_vocab import DraftVocabulary
from headrace.models.eagle_head import EagleHead
from headrace.ops.xp import Array, fresh


class LlamaHead(EagleHead):
    """What EAGLE-1 and EAGLE-3 heads share."""

    def __init__(self, parts: Parts, target: CausalLM, prefix: str, in_size: int):
        spec, source = parts.spec, parts.source
        self.spec, self.target = spec, target
        self.embedding = target.embedding
        if "embed_tokens.weight" in source:
            method = parts.scheme.linear("embed_tokens")
            self.embedding = Embedding(source, "embed_tokens.weight", spec.vocab_size, spec.hidden_size, method)
        if (size := self.embedding.shape[1]) != spec.hidden_size:
            raise ValueError(f"the head has hidden size {spec.hidden_size}, but the model's embedding has {size}")
        self.rotary = RotaryEmbedding(spec.rope, spec.head_dim, spec.max_position)
        self.attention = parts.attention(f"{prefix}.self_attn", 0, in_size)
        self.after_attention = parts.norm(f"{prefix}.post_attention_layernorm")
        self.mlp = parts.gated_mlp(f"{prefix}.mlp")
        self.fc: Linear | None = None
        self._head_bytes: int
        source.ignore("model.rotary_emb.inv_freq")

    @property
    def attention_layers(self) -> list[LayerAttention]:
        return [self.attention.settings]

    @property
    def weight_bytes(self) -> int:
        """Bytes that a pass reads."""
        fc = 0 if self.fc is None else self.fc.weight_bytes
        return fc + self.attention.weight_bytes + self.mlp.weight_bytes + self._head_bytes


class Eagle1Head(LlamaHead):
    """EAGLE-1 and -2."""

    def __init__(self, parts: Parts, target: CausalLM):
        spec, source = parts.spec, parts.source
        if spec.hidden_size != target.spec.hidden_size:
            raise ValueError(
                f"the head continues features of {spec.hidden_size} numbers, not {target.spec.hidden_size}"
            )
        super().__init__(parts, target, "layers.0", spec.hidden_size)
        shard = Shard("fc", spec.hidden_size, bias="fc.bias" in source)
        self._fuse = self.fc = Linear(source, shard, 2 * spec.hidden_size, parts.scheme)
        named = "layers.0.input_layernorm"
        before = parts.norm(named) if f"{named}.weight" in source else NoNorm()
        self.layer = DecoderLayer(self.attention, self.mlp, before_attention=before, before_mlp=self.after_attention)
        source.ignore("lm_head.weight")  # some files repeat the model's
        self._head_bytes = int(target.head.weight.nbytes)

    def fuse(self, features: Array) -> Array:
        return features

    def forward(self, token_ids: Array, features: Array, positions: Array, attend: Attend) -> tuple[Array, Array]:
        both = ops.joined(self.embedding(token_ids), features)
        residual = ops.copied(self._fuse(both))
        update = self.layer(self.layer.before_attention(residual), residual, self.rotary.at(positions), attend)
        out = residual + (update.sum(0) if update.ndim == 3 else update)  # in parts: Linear.partial
        return out, out

    def scores(self, hidden: Array) -> Array:
        return self.target.logits(hidden)


class Eagle3Head(LlamaHead):
    """EAGLE-3."""

    def __init__(self, parts: Parts, target: CausalLM, draft_vocab: int, taps: tuple[int, ...] | None = None):
        spec, source = parts.spec, parts.source
        prefix = "midlayer" if "midlayer.hidden_norm.weight" in source else "layers.0"
        super().__init__(parts, target, prefix, 2 * spec.hidden_size)
        depth = target.spec.num_layers
        self.taps = taps if taps is not None else (2, depth // 2, depth - 3)
        if not all(0 <= tap <= depth for tap in self.taps):
            raise ValueError(f"the head takes features of layers {self.taps}; the model has {depth}")
        in_size = max(1, len(self.taps)) * target.spec.hidden_size
        if self.taps or "fc.weight" in source:
            self.fc = Linear(source, Shard("fc", spec.hidden_size, bias="fc.bias" in source), in_size, parts.scheme)
        elif in_size != spec.hidden_size:
            raise ValueError(f"the head continues features of {spec.hidden_size} numbers, not {in_size}")
        self.input_norm = parts.norm(f"{prefix}.input_layernorm")
        self.hidden_norm = parts.norm(f"{prefix}.hidden_norm")
        self.norm = parts.norm("norm")
        small = Embedding.__new__(Embedding)  # the shape and the method that an untied head takes over
        small.method, small.shape = parts.scheme.linear("lm_head"), (draft_vocab, spec.hidden_size)
        self.head = LMHead(source, "lm_head.weight", small, tied=False)
        self._head_bytes = int(self.head.weight.nbytes)
        self.vocabulary = DraftVocabulary(source, draft_vocab, target.spec.vocab_size)

    def fuse(self, features: Array) -> Array:
        return features if self.fc is None else fresh(self.fc(features))

    def forward(self, token_ids: Array, features: Array, positions: Array, attend: Attend) -> tuple[Array, Array]:
        embedded = self.input_norm(self.embedding(token_ids))
        both = ops.joined(embedded, self.hidden_norm(features))
        residual = ops.copied(features)
        attended = self.attention(both, *self.rotary.at(positions), attend)
        normed, residual = self.after_attention.add(attended, residual)
        hidden, residual = self.norm.add(self.mlp(normed), residual)
        return residual, hidden

    def scores(self, hidden: Array) -> Array:
        return self.head(hidden)
