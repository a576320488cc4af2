"""Medusa heads (Cai et al. 2024): head k gives the token k places behind the one that the model's own head gives.

    block k    x + silu(linear(x)) of the last hidden state [H], then a linear layer [V, H]

Published as `medusa_lm_head.safetensors` beside a config.json with `medusa_num_heads` and `medusa_num_layers`; names
are `K.0.linear.weight`, `K.0.linear.bias` and `K.1.weight`, or the same behind `medusa_head.`. Ours may score fewer
tokens than the model has, which `d2t` then names (models/draft_vocab.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.layers.linear import Linear, Shard
from headrace.layers.weights import WeightSource
from headrace.models.blocks import CausalLM
from headrace.models.draft_vocab import DraftVocabulary
from headrace.ops.xp import Array, namespace
from headrace.quant.base import QuantScheme


@dataclass(frozen=True)
class MedusaKind:
    """What Medusa heads there are."""

    num_heads: int
    num_blocks: int  # of each
    draft_vocab: int  # tokens that they score
    # nodes of a candidate tree of fixed shape, by the ranks of the tokens on the way to each; (): its shape follows the
    # heads' probabilities
    paths: tuple[tuple[int, ...], ...] = ()


class MedusaHeads:
    """All heads of one model; see spec/state_heads.py for how they are called."""

    independent = True  # what a head gives does not depend on the tokens of those before it

    def __init__(self, source: WeightSource, scheme: QuantScheme, target: CausalLM, kind: MedusaKind):
        hidden = target.spec.hidden_size
        self.paths = kind.paths
        self.blocks = [
            [
                Linear(source, Shard(f"{head}.{block}.linear", hidden, bias=True), hidden, scheme)
                for block in range(kind.num_blocks)
            ]
            for head in range(kind.num_heads)
        ]
        self.outputs = [
            Linear(source, Shard(f"{head}.{kind.num_blocks}", kind.draft_vocab), hidden, scheme)
            for head in range(kind.num_heads)
        ]
        self.vocabulary = DraftVocabulary(source, kind.draft_vocab, target.spec.vocab_size)

    @property
    def num_heads(self) -> int:
        return len(self.outputs)

    @property
    def weight_bytes(self) -> int:
        """Bytes that a pass of one head reads, on average."""
        layers = [*(block for blocks in self.blocks for block in blocks), *self.outputs]
        return sum(layer.weight_bytes for layer in layers) // max(1, self.num_heads)

    def draft(self, head: int, states: Array, token_ids: Array) -> tuple[Array, Array]:
        """(logits float32 [R, V] by head 0, 1 ..., the states) of hidden states [R, H], whatever the tokens."""
        xp = namespace(states)
        x = xp.asarray(states, dtype=xp.float32)
        for block in self.blocks[head]:
            y = xp.asarray(block(x), dtype=xp.float32)
            x = x + y / (1.0 + xp.exp(-y))
        return self.vocabulary.spread(self.outputs[head].scores(x)), states
