"""What ties the step loop to the ledger: opens a record when a step is planned, closes it when it commits."""

from __future__ import annotations

import time

from headrace.core.plan import StepPlan, StepResult
from headrace.core.scheduler import Scheduler
from headrace.ledger.cost import CostModel
from headrace.ledger.record import Ledger, OpenStep, split_tokens
from headrace.ledger.work import WorkModel


class LedgerObserver:
    """A `StepObserver` (core/loop.py) that records every step and teaches the cost model."""

    def __init__(self, ledger: Ledger, work: WorkModel, cost: CostModel):
        self.ledger = ledger
        self.cost = cost
        self._work = work
        self._open: dict[int, tuple[OpenStep, float]] = {}  # with the monotonic time at which planning began
        self._last_commit = 0.0

    def planned(self, plan: StepPlan, scheduler: Scheduler, seconds: float) -> None:
        step = self.ledger.begin(plan.step_id)
        trace, pool = scheduler.trace, scheduler.kv.pool
        step.num_spans = plan.num_spans
        step.num_prefill_tokens, step.num_decode_tokens = split_tokens(plan)
        step.num_rows, step.num_waiting = trace.num_running, trace.num_waiting
        step.blocks_free, step.blocks_total = pool.num_free, pool.num_blocks
        step.refusals, step.preempted = trace.refusals, trace.preempted
        step.work = self._work.of_plan(plan)
        step.predicted = self.cost.predict(step.work)
        step.schedule = seconds
        self._open[plan.step_id] = step, time.perf_counter() - seconds

    def committed(self, plan: StepPlan, result: StepResult, scheduler: Scheduler, seconds: float) -> None:
        step, began = self._open.pop(plan.step_id)
        step.num_output_tokens = sum(map(len, result.tokens))
        step.times, step.commit = result.times, seconds
        now = time.perf_counter()
        step.total = now - max(began, self._last_commit)  # with steps in flight: what it added after the one before
        self._last_commit = now
        self.cost.observe(step.work, step.total)
        self.ledger.finish(step)
