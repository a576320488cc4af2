"""AutoDepth: verify as many drafts as pay, judged by the cost model and by how the request's drafts have fared.

With independent acceptance a, k drafts bring (1 - a^(k+1)) / (1 - a) tokens in expectation (Leviathan et al. 2023,
equation 1), and cost the step the predicted time of k more tokens. Of all depths the one with the most tokens per
second for the whole step is taken, so a depth that pays alone may be refused when many requests share the step.
"""

from __future__ import annotations

import numpy as np

from headrace.core.request import Request
from headrace.ledger.cost import CostModel
from headrace.ledger.work import WorkModel

_PRIOR = 0.7  # acceptance assumed of a request's first drafts: optimism costs a few steps, pessimism would never try
_MEMORY = 0.9  # weight of the past against one more verified draft
_FORGET = 0.02  # per step without verification the estimate moves this far back to the prior, so that it is tried again
_MARGIN = 1.02  # drafts must promise this much to be worth it: hysteresis against a noisy prediction
_CONTEXT = 256  # tokens of context assumed; the difference between depths hardly depends on it
_REFRESH = 64  # decisions between looks at the cost model


def expected_tokens(acceptance: float, depth: int) -> float:
    """Tokens that a verification of `depth` drafts brings, each accepted with probability `acceptance`."""
    if acceptance >= 1.0:
        return depth + 1.0
    return (1.0 - acceptance ** (depth + 1)) / (1.0 - acceptance)


class AutoDepth:
    """A `DraftPolicy` (core/drafting.py)."""

    speculates = True

    def __init__(self, cost: CostModel, work: WorkModel, most: int):
        self._cost = cost
        self._work = work
        self._most = most
        self._seconds: dict[tuple[int, int], float] = {}  # (rows, drafts) -> predicted seconds
        self._asked = 0

    def depth(self, request: Request, available: int, num_rows: int) -> int:
        self._asked += 1
        if self._asked % _REFRESH == 0:
            self._seconds.clear()
        acceptance = _PRIOR if request.acceptance is None else request.acceptance
        plain = num_rows / self._predict(num_rows, 0)
        best, best_rate = 0, plain * _MARGIN
        for depth in range(1, min(available, self._most) + 1):
            rate = (num_rows - 1 + expected_tokens(acceptance, depth)) / self._predict(num_rows, depth)
            if rate > best_rate:
                best, best_rate = depth, rate
        if not best and request.acceptance is not None:
            request.acceptance += _FORGET * (_PRIOR - request.acceptance)
        return best

    def _predict(self, num_rows: int, depth: int) -> float:
        key = (num_rows, depth)
        if key not in self._seconds:
            spans = np.full((4, num_rows), 1, np.int32)
            spans[1] = _CONTEXT
            spans[2, 0] += depth
            self._seconds[key] = self._cost.predict(self._work.work(spans, num_rows + depth))
        return self._seconds[key]

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        acceptance = _PRIOR if request.acceptance is None else request.acceptance
        for trial in range(min(num_accepted + 1, num_drafts)):  # drafts behind the first wrong one were not tried
            acceptance = _MEMORY * acceptance + (1 - _MEMORY) * (trial < num_accepted)
        request.acceptance = acceptance
