"""What ties the step loop to the ledger: opens a record when a step is planned, closes it when it commits, and keeps
the accounts of the requests alive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from headrace.core.drafting import Verified
from headrace.core.plan import StepPlan, StepResult
from headrace.core.plan_builder import StepTrace
from headrace.core.request import Request, TokenOutput
from headrace.core.scheduler import Scheduler
from headrace.ledger.bill import Bill, BillKeeper
from headrace.ledger.book import Ledger
from headrace.ledger.cost import CostModel
from headrace.ledger.record import DraftUse, OpenStep, split_tokens
from headrace.ledger.work import WorkModel


class _Planned(NamedTuple):
    """What is to be known of a step when it was planned."""

    trace: StepTrace
    blocks_free: int
    seconds: float  # that planning took
    began: float
    started_at: float  # began, seconds since the epoch


class _Ended(NamedTuple):
    """A step that has committed."""

    plan: StepPlan
    result: StepResult
    verified: Sequence[Verified]
    seconds: float  # that its commit took
    now: float


class LedgerObserver:
    """A `StepObserver` (core/loop.py) that records every step, bills every request and teaches the cost model.

    `num_rows` is the size of the request table, `proposers` are the engine's by number; `clock` is that of
    `Request.arrival`, in seconds. Up to `together` decode steps are dealt with at once: on a processor that has just
    read a model's weights nothing of this code is in the caches, and to bring it there is most of what it costs.
    """

    def __init__(
        self,
        ledger: Ledger,
        work: WorkModel,
        cost: CostModel,
        num_rows: int,
        clock: Callable[[], float] = time.monotonic,
        proposers: Sequence[str] = (),
        together: int = 1,
    ):
        self.ledger = ledger
        self.cost = cost
        self._work = work
        self._bills = BillKeeper(num_rows)
        self._proposers = proposers
        self._scheduler: Scheduler | None = None
        self._clock = clock
        self._together = together
        self._totals = ledger.totals
        self._planned: dict[int, _Planned] = {}
        self._ended: deque[_Ended] = deque()
        self._last_commit = 0.0
        ledger.settle = self.settle

    def bill(self, request_id: str) -> Bill | None:
        """The bill of a request, alive (then so far) or ended; None if it is not known, or no longer."""
        self.settle()
        alive = self._bills.bill(request_id, self._clock())
        return self.ledger.bill(request_id) if alive is None else alive

    def added(self, request: Request) -> None:
        self._bills.add(request)

    def planned(self, plan: StepPlan, scheduler: Scheduler, seconds: float) -> None:
        self._scheduler, now = scheduler, self._clock()
        self._planned[plan.step_id] = _Planned(
            scheduler.trace, scheduler.kv.pool.num_free, seconds, now - seconds, time.time()
        )

    def committed(self, plan: StepPlan, result: StepResult, outputs: list[TokenOutput], seconds: float) -> None:
        assert self._scheduler is not None
        now, ends = self._clock(), any(news.finish_reason for news in outputs)
        self._ended.append(_Ended(plan, result, self._scheduler.verified, seconds, now))
        if ends or len(self._ended) >= self._together or not plan.generates:
            self.settle()
        if ends:
            self._end(outputs, now)

    def settle(self) -> None:
        """Deal with the steps that have committed."""
        while self._ended:
            self._account(*self._ended.popleft())

    def _account(
        self, plan: StepPlan, result: StepResult, verified: Sequence[Verified], seconds: float, now: float
    ) -> None:
        assert self._scheduler is not None
        trace, blocks_free, planning, began, started_at = self._planned.pop(plan.step_id)
        step = self.ledger.begin(plan.step_id)
        step.started_at = started_at
        step.num_spans = plan.num_spans
        step.num_prefill_tokens, step.num_decode_tokens = split_tokens(plan, result.num_runs)
        step.num_rows, step.num_waiting = trace.num_running, trace.num_waiting
        step.blocks_free, step.blocks_total = blocks_free, self._scheduler.kv.pool.num_blocks
        step.refusals, step.preempted, step.prefixes = trace.refusals, trace.preempted, trace.prefixes
        for what, chosen, reason, *over in trace.decisions:
            step.decide(what, chosen, over, reason)
        work = self._work.of_plan(plan)
        step.work = work.times(result.num_runs)
        predicted = self.cost.predict(work)
        step.predicted = predicted * result.num_runs
        step.schedule = planning
        step.num_output_tokens = sum(map(len, result.tokens))
        step.times, step.commit = result.times, seconds
        if verified:
            self._account_drafts(step, plan, result.num_runs, verified)
        self._totals.draft_seconds += result.times.draft
        self._totals.proposers_dropped += len(result.dropped)
        if plan.num_spans == 1:
            own = np.array([predicted])
        else:
            own = self.cost.predict_each(self._work, plan.spans, plan.yields, plan.num_decodes == plan.num_spans)
        step.total = now - max(began, self._last_commit)  # with steps in flight: what it added after the one before
        self._last_commit = now
        self._bills.step(plan, result.num_runs, own * result.num_runs, began, now)
        # drafting is predicted by itself
        self.cost.observe(work, (step.total - step.times.draft) / result.num_runs)
        self.ledger.finish(step)

    def _account_drafts(
        self, step: OpenStep, plan: StepPlan, num_runs: int, verified: Sequence[Verified]
    ) -> None:
        spans = plan.spans.copy()
        spans[2] -= spans[3]
        without = self._work.work(spans, int(np.count_nonzero(plan.yields)))
        extra = max(0.0, step.predicted - num_runs * self.cost.predict(without))
        named = [(self._proposers[each.source], each.num_drafts, each.num_accepted) for each in verified]
        self._totals.add_drafts(named, extra)
        uses: dict[str, list[int]] = {}
        for name, num_drafts, num_accepted in named:
            counts = uses.setdefault(name, [0, 0, 0])
            counts[0] += 1
            counts[1] += num_drafts
            counts[2] += num_accepted
        step.drafts = tuple(DraftUse(name, *counts) for name, counts in uses.items())

    def aborted(self, outputs: list[TokenOutput]) -> None:
        self.settle()
        self._end(outputs, self._clock())

    def _end(self, outputs: list[TokenOutput], now: float) -> None:
        for bill in self._bills.end(outputs, now):
            self.ledger.add_bill(bill)
