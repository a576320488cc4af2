"""Rejection sampling among several candidates of a position, and along a tree: the distribution of what comes out."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.sampling.residual import accept_among
from spec.test_residual import misfit

V, COUNT = 6, 20_000


def without_putting_back(rng: np.random.Generator, q: np.ndarray, count: int) -> list[int]:
    return [
        int(token) for token in rng.choice(len(q), size=min(count, int((q > 0).sum())), replace=False, p=q / q.sum())
    ]


def fits(found: np.ndarray, probs: np.ndarray, variation: float = 0.015) -> None:
    chi_square, distance = misfit(found, probs / probs.sum())
    assert chi_square < 1 and distance < variation


PROBS = {
    "alike": (np.array([0.3, 0.25, 0.2, 0.15, 0.07, 0.03]), np.array([0.35, 0.2, 0.2, 0.1, 0.1, 0.05])),
    "different": (np.array([0.02, 0.03, 0.05, 0.1, 0.3, 0.5]), np.array([0.5, 0.3, 0.1, 0.05, 0.03, 0.02])),
    "truncated": (np.array([0.6, 0.4, 0.0, 0.0, 0.0, 0.0]), np.array([0.0, 0.5, 0.3, 0.2, 0.0, 0.0])),
    "the same": (np.full(V, 1 / V), np.full(V, 1 / V)),
    "certain": (np.array([0.0, 0.0, 1.0, 0.0, 0.0, 0.0]), np.array([0.2, 0.2, 0.2, 0.2, 0.1, 0.1])),
}


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", PROBS)
def test_drawn_candidates_leave_the_distribution(name: str, count: int) -> None:
    probs, q = PROBS[name]
    rng = np.random.default_rng(count)
    found, accepted = np.zeros(V), 0
    for _ in range(COUNT):
        candidates = without_putting_back(rng, q, count)
        index, token = accept_among(probs, candidates, q, rng.random(len(candidates)).tolist(), rng.random())
        assert index < 0 or candidates[index] == token
        found[token] += 1
        accepted += index >= 0
    fits(found, probs)
    if count == 1:  # the most that a single draft allows
        assert accepted / COUNT == pytest.approx(np.minimum(probs, q).sum(), abs=0.015)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", PROBS)
def test_chosen_candidates_do_too(name: str, count: int) -> None:
    probs, q = PROBS[name]
    rng = np.random.default_rng(count)
    candidates = np.argsort(-q)[:count].tolist()
    found, accepted = np.zeros(V), 0
    for _ in range(COUNT):
        index, token = accept_among(probs, candidates, None, rng.random(count).tolist(), rng.random())
        found[token] += 1
        accepted += index >= 0
    fits(found, probs)
    assert accepted / COUNT == pytest.approx(probs[candidates].sum(), abs=0.015)


def test_more_candidates_are_accepted_more_often() -> None:
    probs, q = PROBS["different"]
    rates = []
    for count in (1, 2, 4):
        rng = np.random.default_rng(7)
        draws = [without_putting_back(rng, q, count) for _ in range(4000)]
        rates.append(np.mean([accept_among(probs, d, q, rng.random(len(d)).tolist(), 0.5)[0] >= 0 for d in draws]))
    assert rates[0] + 0.1 < rates[1] and rates[1] + 0.1 < rates[2]


def test_a_tree_of_two_levels_leaves_the_joint_distribution() -> None:
    rng = np.random.default_rng(3)
    first, second = rng.dirichlet(np.ones(V)), rng.dirichlet(np.ones(V), size=V)
    q_first, q_second = rng.dirichlet(np.ones(V)), rng.dirichlet(np.ones(V), size=V)
    found = np.zeros((V, V))
    for _ in range(COUNT):
        branches = {
            token: without_putting_back(rng, q_second[token], 2) for token in without_putting_back(rng, q_first, 3)
        }
        index, token = accept_among(first, list(branches), q_first, rng.random(3).tolist(), rng.random())
        after = branches[token] if index >= 0 else []
        drawn = q_second[token] if after else None
        _, last = accept_among(second[token], after, drawn, rng.random(len(after)).tolist(), rng.random())
        found[token, last] += 1
    fits(found, first[:, None] * second, variation=0.03)


def test_the_plain_rule_would_change_it() -> None:
    """Trying each candidate against the whole distribution, as some texts have it, is measurably wrong."""
    probs, q = PROBS["different"]
    rng = np.random.default_rng(5)
    found = np.zeros(V)
    for _ in range(COUNT):
        for token in without_putting_back(rng, q, 3):
            if rng.random() < probs[token] / q[token]:
                break
        else:
            token = int(rng.choice(V, p=probs))
        found[token] += 1
    with pytest.raises(AssertionError):
        fits(found, probs)


def test_a_candidate_that_could_not_be_drawn_is_refused() -> None:
    probs, q = PROBS["truncated"]
    with pytest.raises(ValueError, match="does not hold it"):
        accept_among(probs, [0], q, [0.5], 0.5)
