"""AutoDepth in a simulated engine: close to the best of no drafts and every fixed depth, at every load."""

from itertools import pairwise

import numpy as np
import pytest

from headrace.autopilot.depth import AutoDepth
from headrace.core.drafting import FixedDepth
from headrace.core.request import Request
from headrace.sampling.params import SamplingParams

MOST = 16
PARAMS = SamplingParams(temperature=0.0)


class Roof:
    """A step's seconds: memory or arithmetic, whichever takes longer, and a part of arithmetic that does not hide."""

    def __init__(self, compute):
        self._compute = compute

    def predict(self, work):
        rows, tokens = work
        return max(1.0, self._compute * tokens) + 0.002 * rows + 0.2 * self._compute * tokens


class Work:
    def work(self, spans, num_logits):
        return spans.shape[1], int(spans[2].sum())


def rate(policy, cost, num_rows, acceptance, steps=160):
    """Tokens per second after a quarter of the steps; each request always has drafts, right with one probability."""
    rng = np.random.default_rng(0)
    requests = [Request(str(i), [1], PARAMS, max_new_tokens=10**9) for i in range(num_rows)]
    tokens, seconds = 0, 0.0
    for step in range(steps):
        depths = [0 if policy is None else policy.depth(request, MOST, num_rows) for request in requests]
        if policy is not None:
            policy.limits([(request, 0) for request in requests], num_rows)
            policy.decisions()
        made = 0
        for request, depth in zip(requests, depths, strict=True):
            accepted = min(depth, int(rng.geometric(1 - acceptance)) - 1)
            if depth:
                policy.observe(request, depth, accepted)
            made += accepted + 1
        if step >= steps // 4:
            tokens += made
            seconds += cost.predict((num_rows, num_rows + sum(depths)))
    return tokens / seconds


@pytest.mark.parametrize("num_rows", [1, 2, 4, 16, 64, 256])
@pytest.mark.parametrize("compute", [0.01, 0.05, 0.2])
def test_never_much_worse_than_none_or_the_best_fixed_depth(compute, num_rows):
    cost = Roof(compute)
    for acceptance in (0.2, 0.6, 0.95):
        best = max(rate(policy, cost, num_rows, acceptance) for policy in (None, *map(FixedDepth, (1, 2, 4, 8, MOST))))
        auto = rate(AutoDepth(cost, Work(), MOST), cost, num_rows, acceptance)
        assert auto >= 0.94 * best, acceptance


def test_no_collapse_when_load_crosses_a_threshold():
    cost = Roof(0.05)
    rates = [rate(AutoDepth(cost, Work(), MOST), cost, rows, 0.7) for rows in range(1, 33)]
    assert all(after >= 0.97 * before for before, after in pairwise(rates))


def test_a_decision_takes_microseconds():
    cost = Roof(0.01)
    policy = AutoDepth(cost, Work(), MOST, ("suffix", "ngram"))
    requests = [Request(str(i), [1], PARAMS, max_new_tokens=9) for i in range(32)]
    spans = [(request, 0) for request in requests]
    calls = 0
    predict = cost.predict

    def counted(work):
        nonlocal calls
        calls += 1
        return predict(work)

    cost.predict = counted
    for _ in range(50):
        for request in requests:
            policy.depth(request, 8, 32)
        policy.limits(spans, 32)
        policy.decisions()
    assert calls < 400, "predictions are made for kinds of request, not for each"
