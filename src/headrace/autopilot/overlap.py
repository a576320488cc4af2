"""RunAhead: drafts, or steps that overlap, whichever brings more tokens per second.

On a GPU the host sends a step while the one before it runs, or, where it is slower than that, several runs of a step at
once (autopilot/host_bound.py). Drafts forbid both: they continue tokens that have to be known. So a policy that drafts
nothing worth having still costs what overlapping would have hidden, which for a small model is a good part of a step.
No prediction decides here: both ways are measured, for each load, a window of steps at a time. The one that has lost is
tried again after a while, and then less often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from headrace.core.drafting import DraftPolicy
from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import Request

_WINDOW = 32  # steps, those of one visit counted each, that a way is measured for
_SETTLING = 4  # steps after a change that do not count
_PATIENCE = 4  # windows after which the other way is tried again, at first
_MOST_PATIENCE = 16
_MEMORY = 0.5  # weight of a rate's past


class RunAhead:
    """A `DraftPolicy` (core/drafting.py) around another one, whose drafts it does without where they do not pay."""

    def __init__(self, policy: DraftPolicy, clock: Callable[[], float] = time.perf_counter):
        self._policy = policy
        self._clock = clock
        self.speculates = True
        self._wanted = True
        self._rates: dict[tuple[bool, int], float] = {}  # (drafting, load) -> tokens per second of a request
        self._patience: dict[int, int] = {}  # load -> windows until the other way is tried
        self._windows = 0  # measured since the way was chosen
        self._trial = False  # the way had lost, and is tried once more
        self._load = 0
        self._steps, self._tokens, self._seconds = 0, 0.0, 0.0  # of this window
        self._last: float | None = None  # when the step before committed, if it counts

    def may_plan(self, requests: Iterable[Request], num_in_flight: int) -> bool:
        if num_in_flight and (self.speculates or self._wanted):
            return False
        if self.speculates != self._wanted:
            self.speculates = self._wanted
            for request in requests:
                request.run_ahead(not self.speculates)
        return True

    def depth(self, request: Request, available: int, num_rows: int) -> int:
        return self._policy.depth(request, available, num_rows) if self.speculates else 0

    def limits(self, requests: Sequence[Request], num_rows: int) -> np.ndarray | None:
        if self.speculates:
            return self._policy.limits(requests, num_rows)
        return np.zeros((0, len(requests)), np.int32)  # nobody is asked

    def decisions(self) -> list[tuple[str, ...]]:
        told = self._policy.decisions()
        if self.speculates:
            return told
        drafting, ahead = (self._rates.get((way, self._load), 0.0) for way in (True, False))
        return [("drafts", "none, so that steps overlap", f"{ahead:.0f} tokens/s a request", f"drafts: {drafting:.0f}")]

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self._policy.observe(request, num_drafts, num_accepted)

    def observe_step(self, plan: StepPlan, result: StepResult) -> None:
        self._policy.observe_step(plan, result)
        now, last = self._clock(), self._last
        self._last = now if plan.generates else None
        load = plan.num_spans.bit_length()
        if load != self._load:
            self._load = load
            self._begin()
        if last is None or not plan.generates or result.warming or self.speculates != self._wanted:
            return
        self._steps += result.num_runs
        if self._steps > _SETTLING:
            self._tokens += sum(map(len, result.tokens)) / plan.num_spans
            self._seconds += now - last
        if self._steps >= _SETTLING + _WINDOW:
            self._learn(self._tokens / max(self._seconds, 1e-9))

    def _begin(self) -> None:
        self._steps, self._tokens, self._seconds = 0, 0.0, 0.0

    def _learn(self, rate: float) -> None:
        """A window is over: stay, or change."""
        here, there = (self.speculates, self._load), (not self.speculates, self._load)
        known = self._rates.get(here)
        self._rates[here] = rate if known is None else _MEMORY * known + (1 - _MEMORY) * rate
        self._windows += 1
        self._begin()
        other, patience = self._rates.get(there), self._patience.get(self._load, _PATIENCE)
        loses = other is not None and self._rates[here] < other
        if self._trial:
            self._trial = False
            patience = self._patience[self._load] = min(2 * patience, _MOST_PATIENCE) if loses else _PATIENCE
        if other is None or loses or self._windows >= patience:
            self._trial = other is not None and not loses
            self._wanted, self._windows = not self.speculates, 0
