"""Experts, soft caps and sums: right against plain formulas, the same on torch, each token's bits its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_reference_ops import check_invariant, check_torch, normal

from headrace import ops
from headrace.ops.moe import choose

HIDDEN, INNER, NUM = 12, 20, 7


def experts(activation: str = "silu", bias: bool = False, convert: Any = np.asarray) -> ops.Experts:
    rng = np.random.default_rng(3)
    shapes = ((NUM, 2 * INNER, HIDDEN), (NUM, HIDDEN, INNER), (NUM, 2 * INNER), (NUM, HIDDEN))
    gate_up, down, gate_up_bias, down_bias = (convert(rng.standard_normal(shape, np.float32)) for shape in shapes)
    return ops.Experts(gate_up, down, activation, gate_up_bias if bias else None, down_bias if bias else None)


def plain(x: np.ndarray, scores: np.ndarray, routing: ops.Routing, bias: bool) -> np.ndarray:
    """Token by token, in float64; silu."""
    each = experts(bias=bias)
    out = np.zeros(x.shape)
    for t, (token, row) in enumerate(zip(x.astype(np.float64), scores.astype(np.float64), strict=True)):
        probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        chosen = sorted(range(NUM), key=lambda e: (-row[e], e))[: routing.top_k]
        total = sum(probabilities[e] for e in chosen) if routing.normalise else 1.0
        for e in chosen:
            both = each.gate_up[e] @ token + (each.gate_up_bias[e] if bias else 0)
            inner = both[:INNER] / (1 + np.exp(-both[:INNER])) * both[INNER:]
            answer = each.down[e] @ inner + (each.down_bias[e] if bias else 0)
            out[t] += probabilities[e] / total * answer
    return out


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("top_k", "bias"), [(1, False), (3, True), (NUM, False)])
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_moe(tokens: int, top_k: int, bias: bool, normalise: bool) -> None:
    routing = ops.Routing(top_k, normalise)
    x, scores = normal(tokens, HIDDEN), normal(tokens, NUM) * 3
    found = ops.moe(x, scores, experts(bias=bias), routing)
    np.testing.assert_allclose(found, plain(x, scores, routing, bias), rtol=1e-4, atol=1e-4)
    on_torch = ops.moe(
        torch.from_numpy(x), torch.from_numpy(scores), experts(bias=bias, convert=torch.from_numpy), routing
    )
    np.testing.assert_allclose(on_torch.numpy(), found, rtol=1e-4, atol=1e-4)
    out = np.full_like(x, np.nan)
    assert ops.moe(x, scores, experts(bias=bias), routing, out=out) is out
    np.testing.assert_array_equal(out, found)


def test_a_token_does_not_see_the_others() -> None:
    x, scores = normal(37, HIDDEN), normal(37, NUM)
    check_invariant(lambda index: ops.moe(x[index], scores[index], experts(bias=True), ops.Routing(3, True)))


def test_among_equal_scores_the_first_experts_win() -> None:
    chosen, weights = choose(np.array([[1, 5, 5, 1, 5, 0, 0]], np.float32), ops.Routing(2, True))
    assert chosen.tolist() == [[1, 2]] and weights.tolist() == [[0.5, 0.5]]


def test_swiglu_clamped() -> None:
    x = normal(9, 2 * INNER) * 8
    gate, up = np.minimum(x[:, :INNER], 7).astype(np.float64), np.clip(x[:, INNER:], -7, 7)
    expected = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    found = check_torch(ops.swiglu_clamped_mul, [x], tolerance=1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.isfinite(ops.swiglu_clamped_mul(np.full((1, 2), -1e30, np.float32))).all()


def test_add_scale_and_cap() -> None:
    x, y = normal(5, 33) * 40, normal(5, 33)
    np.testing.assert_array_equal(check_torch(ops.add, [x, y]), x + y)
    np.testing.assert_array_equal(check_torch(lambda a: ops.scale(a, 640**0.5), [x]), x * np.float32(640**0.5))
    capped = check_torch(lambda a: ops.soft_cap(a, 30.0), [x], tolerance=1e-5)
    np.testing.assert_allclose(capped, 30 * np.tanh(x.astype(np.float64) / 30), rtol=1e-5)
    for function in (lambda a, out=None: ops.scale(a, 3.0, out=out), lambda a, out=None: ops.soft_cap(a, 2.0, out=out)):
        expected, own = function(x), x.copy()
        assert function(own, out=own) is own
        np.testing.assert_array_equal(own, expected)
    check_invariant(lambda index: ops.soft_cap(np.resize(x, (37, 33))[index], 30.0))
