"""SloPacing: as much prompt in each step as keeps the tokens of running requests within their objective.

Two objectives. ITL: a step that decodes should take no longer. TTFT: a request's first token should come within so
long of its arrival. A chunk is the largest whose step the cost model predicts to keep the ITL; if the prompt whose turn
it is would then be too late, it is the smallest that brings it in time, as long as the step stays below `STRETCH` times
the ITL. Steps that decode nothing have nobody to disturb and take the whole budget. A request joins the running ones if
the decodes of all of them are predicted to keep the ITL, or, once it is late, `STRETCH` times the ITL.

Nothing starves, whatever the cost model says: a chunk is never below `FLOOR` tokens, and when nothing runs the next
request joins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from headrace.core.plan_builder import PlanBuilder
from headrace.core.request import Request
from headrace.ledger.cost import CostModel
from headrace.ledger.work import WorkModel

FLOOR = 16  # tokens: a chunk this small hardly lengthens a step
STRETCH = 2.0


class SloPacing:
    """A `Pacing` (core/pacing.py). `itl` and `ttft` are seconds; None: no such objective."""

    def __init__(
        self,
        cost: CostModel,
        work: WorkModel,
        *,
        itl: float | None,
        ttft: float | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._cost = cost
        self._work = work
        self._itl = itl
        self._ttft = ttft
        self._clock = clock
        self._rate = 0.0  # prompt tokens a second, as of the latest chunk

    def prompt_tokens(self, decodes: PlanBuilder, budget: int, prompt: Request) -> tuple[int, str]:
        num_decodes = len(decodes.requests)
        spans = np.concatenate([decodes.spans(), np.zeros((4, 1), np.int32)], axis=1)
        spans[1, -1] = prompt.num_scheduled

        def seconds(chunk: int) -> float:
            spans[2, -1] = chunk
            return self._cost.predict(self._work.work(spans, num_decodes + 1))

        if self._itl is None or not num_decodes:
            self._rate = budget / max(seconds(budget), 1e-9)
            return budget, ""
        itl, least = self._itl, min(FLOOR, budget)
        chunk = _largest(least, budget, lambda size: seconds(size) <= itl)
        reason = f"larger ones are predicted to exceed the ITL objective of {itl * 1e3:g} ms"
        late = self._left(prompt)
        if late is not None and chunk < budget:
            left = max(1, prompt.num_unscheduled)

            def comes_in_time(size: int) -> bool:
                return -(-left // size) * seconds(size) <= late

            if not comes_in_time(chunk):
                most = _largest(chunk, budget, lambda size: seconds(size) <= STRETCH * itl)
                chunk = _smallest(chunk, most, comes_in_time)
                reason = f"with less, the first token of {prompt.id} would miss its objective"
        self._rate = chunk / max(seconds(chunk), 1e-9)
        return chunk, reason if chunk < budget else ""

    def holds_back(self, running: Sequence[Request], entering: Request) -> str:
        if self._itl is None:
            return ""
        rows = [*running, entering]
        spans = np.ones((4, len(rows)), np.int32)
        spans[1] = [len(each.token_ids) for each in rows]
        seconds = self._cost.predict(self._work.work(spans, len(rows)))
        late = self._left(entering)
        allowed = self._itl * (STRETCH if late is not None and late <= 0 else 1.0)
        if seconds <= allowed:
            return ""
        return f"a step of {len(rows)} decodes is predicted to take {seconds * 1e3:.1f} ms, above {allowed * 1e3:g} ms"

    def backlog(self, prompts: Iterable[Request]) -> float:
        if self._ttft is None or not self._rate:
            return 0.0
        return sum(each.num_unscheduled for each in prompts) / self._rate

    def _left(self, request: Request) -> float | None:
        """Seconds left for the first token; None where nobody waits for it so."""
        if self._ttft is None or request.batch or request.num_output:
            return None
        return request.arrival + self._ttft - self._clock()


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest size from `low` to `high` that fits, if sizes fit up to some size; `low` even if it does not."""
    if fits(high):
        return high
    while high - low > max(1, low // 16):  # a few tokens more or less are below what a prediction can tell
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _smallest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The smallest size from `low` to `high` that fits, if sizes fit from some size on; `high` if none does."""
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
