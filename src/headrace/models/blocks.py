"""What the decoder-only families share: their parts, a decoder layer, and the model around a stack of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from headrace import ops
from headrace.attention.base import LayerAttention
from headrace.layers.attention import Attend, Attention
from headrace.layers.embedding import Embedding, LMHead
from headrace.layers.mlp import GatedMLP
from headrace.layers.moe import ExpertLayout, ExpertNames, MixtureOfExperts
from headrace.layers.norm import NoNorm, Norm, RMSNorm
from headrace.layers.rope import RotaryEmbedding
from headrace.layers.weights import WeightSource
from headrace.models.spec import ModelSpec
from headrace.ops.xp import Array, namespace
from headrace.quant.base import QuantScheme


@dataclass(frozen=True)
class Parts:
    """What a model is built from: its facts, its tensors, how linear layers store theirs."""

    spec: ModelSpec
    source: WeightSource
    scheme: QuantScheme

    def norm(self, name: str) -> RMSNorm:
        spec = self.spec
        return RMSNorm(self.source, f"{name}.weight", spec.hidden_size, spec.norm_eps, spec.norm_offset)

    def attention(self, prefix: str, layer: int, in_size: int | None = None) -> Attention:
        return Attention(self.spec, self.source, prefix, self.scheme, layer, in_size)

    def gated_mlp(self, prefix: str) -> GatedMLP:
        return GatedMLP(self.spec, self.source, prefix, self.scheme)

    def moe(self, prefix: str, names: ExpertNames, *, layout: ExpertLayout = ExpertLayout.OUT_IN) -> MixtureOfExperts:
        return MixtureOfExperts(self.spec, self.source, prefix, self.scheme, names, layout)


@dataclass(frozen=True)
class DecoderLayer:
    """x + after(attention(before(x))), then the same with the mlp. `before` and `after` are norms where the family
    has them, else nothing. A sum is made by the norm that follows it."""

    attention: Attention
    mlp: GatedMLP | MixtureOfExperts
    before_attention: Norm = field(default_factory=NoNorm)
    after_attention: Norm = field(default_factory=NoNorm)
    before_mlp: Norm = field(default_factory=NoNorm)
    after_mlp: Norm = field(default_factory=NoNorm)

    def __call__(self, normed: Array, residual: Array, angles: tuple[Array, Array], attend: Attend) -> Array:
        """normed: before_attention of `residual`, both [T, H]. Returns what is still to be added to `residual`, which
        has been brought up to date in place with the attention's output."""
        attended = self.after_attention(self.attention(normed, *angles, attend))
        normed, residual = self.before_mlp.add(attended, residual)
        return self.after_mlp(self.mlp(normed))

    @property
    def num_parameters(self) -> int:
        norms = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return self.attention.num_parameters + self.mlp.num_parameters + sum(norm.num_parameters for norm in norms)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the linear layers and experts."""
        return self.attention.weight_bytes + self.mlp.weight_bytes


class CausalLM:
    """Embedding, decoder layers, final norm and output head, under Hugging Face's names for a Llama."""

    def __init__(self, parts: Parts, layer: Callable[[Parts, int], DecoderLayer]):
        spec, source = parts.spec, parts.source
        self.spec = spec
        method = parts.scheme.linear("model.embed_tokens")
        self.embedding = Embedding(
            source, "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size, method, spec.embedding_scale
        )
        ropes = [spec.layer_rope(index) for index in range(spec.num_layers)]
        self.rotaries = {rope: RotaryEmbedding(rope, spec.head_dim, spec.max_position) for rope in dict.fromkeys(ropes)}
        self.layers = [layer(parts, index) for index in range(spec.num_layers)]
        self.norm = parts.norm("model.norm")
        self.head = LMHead(source, "lm_head.weight", self.embedding, spec.tie_word_embeddings, spec.logit_soft_cap)
        source.ignore("model.rotary_emb.inv_freq")
        self.taps: tuple[int, ...] = ()  # layers before which the residual stream is wanted as a feature
        self._tapped: dict[int, Array] = {}

    @property
    def tapped(self) -> tuple[Array, ...]:
        """The residual streams [T, H] at `taps` in the last pass."""
        return tuple(self._tapped[tap] for tap in self.taps)

    def features(self, hidden: Array) -> Array:
        """Of the tokens of the last pass, which gave `hidden` [T, H]: the residual streams at `taps` side by side
        [T, taps * H], or `hidden` where there are none."""
        xp = namespace(hidden)
        return xp.concat(self.tapped, axis=1) if self.taps else hidden

    def forward(self, token_ids: Array, positions: Array, attend: Attend) -> Array:
        """Hidden states after the final norm, float32 [T, H], of token_ids [T] at positions [T]."""
        angles = {rope: rotary.at(positions) for rope, rotary in self.rotaries.items()}
        residual = self.embedding(token_ids)
        normed = self.layers[0].before_attention(residual)
        following = [*(layer.before_attention for layer in self.layers[1:]), self.norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            if index in self.taps:
                self._tapped[index] = ops.copied(residual)
            update = layer(normed, residual, angles[self.spec.layer_rope(index)], attend)
            normed, residual = next_norm.add(update, residual)
        if len(self.layers) in self.taps:
            self._tapped[len(self.layers)] = ops.copied(residual)
        return normed

    def prepare(self, max_len: int, place: Callable[[np.ndarray], Array]) -> None:
        """Put what depends on positions alone where the model computes, for sequences of up to `max_len` tokens."""
        for rotary in self.rotaries.values():
            rotary.prepare(max_len, place)

    def logits(self, hidden: Array) -> Array:
        """Scores of every token, float32 [L, V], of hidden states [L, H]."""
        return self.head(hidden)

    @property
    def attention_layers(self) -> list[LayerAttention]:
        """What each layer asks of attention, in order."""
        return [layer.attention.settings for layer in self.layers]

    @property
    def num_parameters(self) -> int:
        """Learned numbers; a tied matrix counts once."""
        embedding = self.embedding.weight.size * (1 if self.head.tied else 2)
        layers = sum(layer.num_parameters for layer in self.layers)
        return int(embedding + layers + self.norm.num_parameters)

    @property
    def weight_bytes(self) -> int:
        """Bytes of every linear layer, every expert and the head: what a step reads that has tokens for all experts.

        The embedding counts only as a tied head: a step looks up a few of its vectors.
        """
        return int(sum(layer.weight_bytes for layer in self.layers) + self.head.weight.nbytes)


def refuse(spec: ModelSpec, **unsupported: object) -> None:
    """Raise ValueError if any of the named switches is on: such a checkpoint is not one of this family's."""
    if named := [name for name, value in unsupported.items() if value]:
        raise ValueError(f"a {spec.family} model has no {', '.join(named)}")


def require(spec: ModelSpec, **needed: object) -> None:
    """Raise ValueError if any of the named switches is off: the family has it, the spec forgot it."""
    if named := [name for name, value in needed.items() if not value]:
        raise ValueError(f"a {spec.family} model has {', '.join(named)}: its spec must say so")
