"""What the decoder-only families share: a pre-norm decoder layer, and the model around a stack of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.attention.base import LayerAttention
from headrace.layers.attention import Attend, Attention
from headrace.layers.embedding import Embedding, LMHead
from headrace.layers.linear import MergedLinear
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.layers.rope import RotaryEmbedding
from headrace.layers.weights import WeightSource
from headrace.models.spec import ModelSpec
from headrace.ops.xp import Array
from headrace.quant.base import QuantScheme


@dataclass(frozen=True)
class Parts:
    """What a model is built from: its facts, its tensors, how linear layers store theirs."""

    spec: ModelSpec
    source: WeightSource
    scheme: QuantScheme

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.source, f"{name}.weight", self.spec.hidden_size, self.spec.norm_eps)

    def attention(self, prefix: str, layer: int) -> Attention:
        return Attention(self.spec, self.source, prefix, self.scheme, layer)

    def gated_mlp(self, prefix: str) -> GatedMLP:
        return GatedMLP(self.spec, self.source, prefix, self.scheme)


@dataclass(frozen=True)
class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)). Each sum is made by the norm that follows it."""

    input_norm: RMSNorm
    attention: Attention
    post_norm: RMSNorm
    mlp: GatedMLP

    def __call__(self, normed: Array, residual: Array, angles: tuple[Array, Array], attend: Attend) -> Array:
        """normed: input_norm of `residual`, both [T, H]. Returns what is still to be added to `residual`, which has
        been brought up to date in place with the attention's output."""
        attended = self.attention(normed, *angles, attend)
        normed, residual = self.post_norm.add(attended, residual)
        return self.mlp(normed)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return self.attention.linears + self.mlp.linears

    @property
    def norms(self) -> tuple[RMSNorm, ...]:
        return (self.input_norm, self.post_norm, *self.attention.norms)


class CausalLM:
    """Embedding, decoder layers, final norm and output head, under Hugging Face's names for a Llama."""

    def __init__(self, parts: Parts, layer: Callable[[Parts, int], DecoderLayer]):
        spec, source = parts.spec, parts.source
        self.spec = spec
        self.embedding = Embedding(source, "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self.rotary = RotaryEmbedding(spec.rope, spec.head_dim, spec.max_position)
        self.layers = [layer(parts, index) for index in range(spec.num_layers)]
        self.norm = parts.norm("model.norm")
        self.head = LMHead(source, "lm_head.weight", self.embedding, spec.tie_word_embeddings)
        source.ignore("model.rotary_emb.inv_freq")

    def forward(self, token_ids: Array, positions: Array, attend: Attend) -> Array:
        """Hidden states after the final norm, float32 [T, H], of token_ids [T] at positions [T]."""
        angles = self.rotary.at(positions)
        residual = self.embedding(token_ids)
        normed = self.layers[0].input_norm(residual)
        following = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for layer, next_norm in zip(self.layers, following, strict=True):
            update = layer(normed, residual, angles, attend)
            normed, residual = next_norm.add(update, residual)
        return normed

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
        linears = sum(linear.num_parameters for layer in self.layers for linear in layer.linears)
        norms = sum(norm.weight.size for layer in self.layers for norm in layer.norms)
        return int(embedding + linears + norms + self.norm.weight.size)

    @property
    def weight_bytes(self) -> int:
        """Bytes that a step reads whatever its tokens: every linear layer and the head.

        The embedding counts only as a tied head: a step looks up a few of its vectors.
        """
        linears = sum(linear.weight_bytes for layer in self.layers for linear in layer.linears)
        return int(linears + self.head.weight.nbytes)


def refuse(spec: ModelSpec, **unsupported: object) -> None:
    """Raise ValueError if any of the named switches is on: such a checkpoint is not one of this family's."""
    if named := [name for name, value in unsupported.items() if value]:
        raise ValueError(f"a {spec.family} model has no {', '.join(named)}")
