"""Mixture of experts (Shazeer et al. 2017), the same bits for a token whatever company it keeps.

The contract that every implementation follows. A token's experts are the `top_k` best of its router scores, among
equals the first ones. Each chosen expert's gated feed-forward block runs on its tokens through the op `linear`, or a
product with the same promise: its bits do not depend on who else chose that expert. The weighted results of a token are
added to zero in the order of the experts' numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.ops.activation import ACTIVATIONS
from headrace.ops.linear import linear
from headrace.ops.registry import op
from headrace.ops.xp import Array, namespace


@dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen and weighted.

    `top_k` probabilities of a softmax over all experts, divided by their sum if `normalise`. Choosing first and taking
    the softmax of the chosen scores alone (GPT-OSS) is the same as normalising.
    """

    top_k: int
    normalise: bool


@dataclass(frozen=True)
class Experts:
    """The weights of E experts with I inner dimensions: merged gate | up, and down."""

    gate_up: Array | Sequence[Any]  # [E, 2I, H], or E matrices that `product` takes
    down: Array | Sequence[Any]  # [E, H, I], or E such matrices
    activation: str  # key of ops.activation.ACTIVATIONS
    gate_up_bias: Array | None = None  # [E, 2I]
    down_bias: Array | None = None  # [E, H]
    product: Callable[..., Array] = linear  # (x, matrix, bias) -> x times the matrix transposed, plus bias


def choose(scores: Array, routing: Routing) -> tuple[Array, Array]:
    """(experts [T, k], weights [T, k]) of router scores [T, E], best expert first."""
    xp = namespace(scores)
    exponentials = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    probabilities = exponentials / xp.sum(exponentials, axis=-1, keepdims=True)
    # By score, not by probability: two scores may round to one probability.
    chosen = xp.argsort(-scores, axis=-1, stable=True)[:, : routing.top_k]
    weights = xp.take_along_axis(probabilities, chosen, axis=-1)
    if routing.normalise:
        weights = weights / xp.sum(weights, axis=-1, keepdims=True)
    return chosen, weights


@op
def moe(x: Array, scores: Array, experts: Experts, routing: Routing, out: Array | None = None) -> Array:
    """The experts' answer to x [T, H] with router scores [T, E]: float32 [T, H]. `out` must not be x."""
    xp = namespace(x)
    chosen, weights = choose(scores, routing)
    if out is None:
        out = xp.empty(tuple(x.shape), dtype=x.dtype)
    out[...] = 0.0
    activation = ACTIVATIONS[experts.activation]
    for expert in sorted(set(chosen.reshape(-1).tolist())):
        tokens, ranks = xp.nonzero(chosen == expert)
        gate_up_bias = None if experts.gate_up_bias is None else experts.gate_up_bias[expert]
        down_bias = None if experts.down_bias is None else experts.down_bias[expert]
        inner = experts.product(xp.take(x, tokens, axis=0), experts.gate_up[expert], gate_up_bias)
        answer = experts.product(activation(inner), experts.down[expert], down_bias)
        out[tokens] += answer * weights[tokens, ranks][:, None]
    return out
