"""What ties the step loop to the ledger: opens a record when a step is planned, closes it when it commits, and keeps
the accounts of the requests alive."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from headrace.core.drafting import Verified
from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import Request, TokenOutput
from headrace.core.scheduler import Scheduler
from headrace.ledger.bill import Bill, BillKeeper
from headrace.ledger.book import Ledger
from headrace.ledger.cost import CostModel
from headrace.ledger.record import DraftUse, OpenStep, split_tokens
from headrace.ledger.work import StepWork, WorkModel


class LedgerObserver:
    """A `StepObserver` (core/loop.py) that records every step, bills every request and teaches the cost model.

    `num_rows` is the size of the request table, `proposers` are the engine's by number; `clock` is that of
    `Request.arrival`, in seconds.
    """

    def __init__(
        self,
        ledger: Ledger,
        work: WorkModel,
        cost: CostModel,
        num_rows: int,
        clock: Callable[[], float] = time.monotonic,
        proposers: Sequence[str] = (),
    ):
        self.ledger = ledger
        self.cost = cost
        self._work = work
        self._bills = BillKeeper(num_rows)
        self._proposers = proposers
        self._verified: Callable[[], Sequence[Verified]] = tuple  # by the last step
        self._clock = clock
        # with the work of one run, and the time at which planning began
        self._open: dict[int, tuple[OpenStep, StepWork, float]] = {}
        self._last_commit = 0.0

    def bill(self, request_id: str) -> Bill | None:
        """The bill of a request, alive (then so far) or ended; None if it is not known, or no longer."""
        alive = self._bills.bill(request_id, self._clock())
        return self.ledger.bill(request_id) if alive is None else alive

    def added(self, request: Request) -> None:
        self._bills.add(request)

    def planned(self, plan: StepPlan, scheduler: Scheduler, seconds: float) -> None:
        step = self.ledger.begin(plan.step_id)
        self._verified = lambda: scheduler.verified
        trace, pool = scheduler.trace, scheduler.kv.pool
        step.num_spans = plan.num_spans
        step.num_prefill_tokens, step.num_decode_tokens = split_tokens(plan)
        step.num_rows, step.num_waiting = trace.num_running, trace.num_waiting
        step.blocks_free, step.blocks_total = pool.num_free, pool.num_blocks
        step.refusals, step.preempted, step.prefixes = trace.refusals, trace.preempted, trace.prefixes
        for what, chosen, reason, *over in trace.decisions:
            step.decide(what, chosen, over, reason)
        work = self._work.of_plan(plan)
        step.work = work.times(plan.num_runs)
        step.predicted = self.cost.predict(work) * plan.num_runs
        step.schedule = seconds
        self._open[plan.step_id] = step, work, self._clock() - seconds

    def committed(self, plan: StepPlan, result: StepResult, outputs: list[TokenOutput], seconds: float) -> None:
        step, work, began = self._open.pop(plan.step_id)
        step.num_output_tokens = sum(map(len, result.tokens))
        step.times, step.commit = result.times, seconds
        if verified := self._verified():
            self._account_drafts(step, plan, verified)
        totals = self.ledger.totals
        totals.draft_seconds += result.times.draft
        totals.proposers_dropped += len(result.dropped)
        if plan.num_spans == 1:
            own = np.array([self.cost.predict(work)])
        else:
            own = self.cost.predict_each(self._work, plan.spans, plan.yields, plan.num_decodes == plan.num_spans)
        now = self._clock()
        step.total = now - max(began, self._last_commit)  # with steps in flight: what it added after the one before
        self._last_commit = now
        self._bills.step(plan, own * plan.num_runs, began, now)
        # drafting is predicted by itself
        self.cost.observe(work, (step.total - step.times.draft) / plan.num_runs)
        self.ledger.finish(step)
        self._end(outputs, now)

    def _account_drafts(self, step: OpenStep, plan: StepPlan, verified: Sequence[Verified]) -> None:
        spans = plan.spans.copy()
        spans[2] -= spans[3]
        without = self._work.work(spans, int(np.count_nonzero(plan.yields)))
        extra = max(0.0, step.predicted - self.cost.predict(without))
        named = [(self._proposers[each.source], each.num_drafts, each.num_accepted) for each in verified]
        self.ledger.totals.add_drafts(named, extra)
        uses: dict[str, list[int]] = {}
        for name, num_drafts, num_accepted in named:
            counts = uses.setdefault(name, [0, 0, 0])
            counts[0] += 1
            counts[1] += num_drafts
            counts[2] += num_accepted
        step.drafts = tuple(DraftUse(name, *counts) for name, counts in uses.items())

    def aborted(self, outputs: list[TokenOutput]) -> None:
        self._end(outputs, self._clock())

    def _end(self, outputs: list[TokenOutput], now: float) -> None:
        for bill in self._bills.end(outputs, now):
            self.ledger.add_bill(bill)
