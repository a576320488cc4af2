"""RunAhead: drafts, or steps that overlap, whichever brings more tokens per second.

On a GPU the host sends a step while the one before it runs, or, where it is slower than that, several runs of a step at
once (autopilot/host_bound.py). Drafts forbid the first: they continue tokens that have to be known. Those of a network
follow on the GPU, so that steps with them may still run several times at once; to look one up the host has to see every
token. So a policy that drafts nothing worth having still costs what would have been hidden, which for a small model is
a good part of a step. No prediction decides here: all ways, nothing drafted, by networks only, by all that there are,
are measured, for each load, a window of steps at a time. Those that have lost are tried again after a while, and then
less often.
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
_PATIENCE = 4  # windows after which another way is tried again, at first
_MOST_PATIENCE = 32
_FAR = 0.8  # a way that brings less than this of the best one is not tried again so soon
_MEMORY = 0.5  # weight of a rate's past
_PAUSE = 4.0  # a step that takes so many times what is usual was held up by something else
NOTHING = 0  # the first way


class RunAhead:
    """A `DraftPolicy` (core/drafting.py) around another one, whose drafts it does without where they do not pay."""

    def __init__(
        self,
        policy: DraftPolicy,
        clock: Callable[[], float] = time.perf_counter,
        look_ups: Sequence[int] = (),
        tell: Callable[[int], None] = lambda way: None,
    ):
        """`look_ups`: the policy's proposers that are none of the networks, if it has both. `tell` is called with the
        way to draft that is followed from now on."""
        self._policy = policy
        self._clock = clock
        self._look_ups = list(look_ups)
        self._tell = tell
        self._last_way = 2 if look_ups else 1  # everything that drafts; of three, the one in the middle: networks
        self._way = self._wanted = self._last_way
        tell(self._way)
        self.speculates = True
        self._rates: dict[tuple[int, int], float] = {}  # (way, load) -> tokens per second of a request
        self._usual: dict[tuple[int, int], float] = {}  # seconds of a run, smoothed
        self._patience: dict[tuple[int, int], int] = {}  # windows until the way is tried again
        self._since: dict[tuple[int, int], int] = {}  # windows since it was measured
        self._trial = False  # the way had lost, and is tried once more
        self._load = 0
        self._steps, self._tokens, self._seconds = 0, 0.0, 0.0  # of this window
        self._last: float | None = None  # when the step before committed, if it counts

    def may_plan(self, requests: Iterable[Request], num_in_flight: int) -> bool:
        if num_in_flight and (self._way or self._wanted):
            return False
        if self._way != self._wanted:
            self._way = self._wanted
            self.speculates = self._way != NOTHING
            if self.speculates:
                self._tell(self._way)
            for request in requests:
                request.run_ahead(not self.speculates)
        return True

    def depth(self, request: Request, available: int, num_rows: int) -> int:
        return self._policy.depth(request, available, num_rows) if self.speculates else 0

    def limits(self, requests: Sequence[Request], num_rows: int) -> np.ndarray | None:
        if not self.speculates:
            return np.zeros((0, len(requests)), np.int32)  # nobody is asked
        limits = self._policy.limits(requests, num_rows)
        if self._way == self._last_way or limits is None or not len(limits):
            return limits
        limits[self._look_ups] = 0
        return limits if limits.any() else limits[:0]

    def decisions(self) -> list[tuple[str, ...]]:
        told = self._policy.decisions()
        if self._way == self._last_way:
            return told
        here, *others = (
            f"{self._told(way)}: {self._rates.get((way, self._load), 0.0):.0f} tokens/s a request"
            for way in sorted(range(self._last_way + 1), key=lambda way: way != self._way)
        )
        return [*told, ("drafts", self._told(self._way), here, *others)]

    def _told(self, way: int) -> str:
        return ("none, so that steps overlap", "by networks, so that steps run on", "by all")[
            2 if way == self._last_way else way
        ]

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self._policy.observe(request, num_drafts, num_accepted)

    def observe_step(self, plan: StepPlan, result: StepResult) -> None:
        self._policy.observe_step(plan, result)
        now, last = self._clock(), self._last
        self._last = now if plan.generates else None
        load = plan.num_spans.bit_length()
        if load != self._load:
            self._load, self._trial = load, False
            self._begin()
        if last is None or not plan.generates or result.warming or self._way != self._wanted:
            return
        settled = self._steps >= _SETTLING
        self._steps += result.num_runs
        if settled:
            self._tokens += sum(map(len, result.tokens)) / plan.num_spans
            self._seconds += self._taken(result.num_runs, now - last)
        if self._steps >= _SETTLING + _WINDOW:
            self._learn(self._tokens / max(self._seconds, 1e-9))

    def _taken(self, num_runs: int, seconds: float) -> float:
        """What a step is taken to have needed: a pause of the machine would say much of one way and nothing of it."""
        here, run = (self._way, self._load), seconds / num_runs
        usual = self._usual.get(here, run)
        run = min(run, _PAUSE * usual)
        self._usual[here] = usual + 0.1 * (run - usual)
        return num_runs * run

    def _begin(self) -> None:
        self._steps, self._tokens, self._seconds = 0, 0.0, 0.0

    def _learn(self, rate: float) -> None:
        """A window is over: stay, or change."""
        here, ways = (self._way, self._load), [(way, self._load) for way in range(self._last_way + 1)]
        known = self._rates.get(here)
        self._rates[here] = rate if known is None else _MEMORY * known + (1 - _MEMORY) * rate
        self._begin()
        for way in ways:
            self._since[way] = 0 if way == here else self._since.get(way, 0) + 1
        new = [way for way in ways if way not in self._rates]
        if new:
            self._wanted = new[-1][0]
            return
        best = max(ways, key=self._rates.__getitem__)
        if self._trial:
            self._trial = False
            slower = 4 if self._rates[here] < _FAR * self._rates[best] else 2
            longer = min(slower * self._patience.get(here, _PATIENCE), _MOST_PATIENCE)
            self._patience[here] = _PATIENCE if here == best else longer
        due = [way for way in ways if way != best and self._since[way] >= self._patience.get(way, _PATIENCE)]
        self._trial = bool(due) and here == best
        self._wanted = max(due, key=self._since.__getitem__)[0] if self._trial else best[0]
