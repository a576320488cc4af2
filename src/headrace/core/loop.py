"""EngineCore: the step loop. Plans go to the executor, results come back in order; nothing else happens here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from headrace import env
from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import FinishReason, Request, TokenOutput
from headrace.core.scheduler import Scheduler


class PendingResult(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """Wait for it; raises what went wrong."""
        ...


class StepRunner(Protocol):
    """What the loop needs of an executor."""

    def execute(self, plan: StepPlan) -> PendingResult:
        """Start a step; steps complete in the order of the calls."""
        ...


class StepObserver(Protocol):
    """What is told of every request and step (the ledger)."""

    def added(self, request: Request) -> None:
        """A request was queued."""
        ...

    def planned(self, plan: StepPlan, scheduler: Scheduler, seconds: float) -> None:
        """A plan was made, which took `seconds`, and goes to the executor now."""
        ...

    def committed(self, plan: StepPlan, result: StepResult, outputs: list[TokenOutput], seconds: float) -> None:
        """A result was taken, which took `seconds`, and brought `outputs`; in the order of the plans."""
        ...

    def aborted(self, outputs: list[TokenOutput]) -> None:
        """Requests were ended between steps."""
        ...


class NullObserver:
    """Observes nothing."""

    def added(self, request: Request) -> None:
        pass

    def planned(self, plan: StepPlan, scheduler: Scheduler, seconds: float) -> None:
        pass

    def committed(self, plan: StepPlan, result: StepResult, outputs: list[TokenOutput], seconds: float) -> None:
        pass

    def aborted(self, outputs: list[TokenOutput]) -> None:
        pass


class EngineCore:
    """Steps requests to their ends, with up to `depth` steps in flight."""

    def __init__(self, scheduler: Scheduler, runner: StepRunner, depth: int = 1, observer: StepObserver | None = None):
        if depth < 1:
            raise ValueError(f"at least one step must be in flight, not {depth}")
        self.scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._observer: StepObserver = observer or NullObserver()
        self._always_check = env.check_every_step()
        self._in_flight: deque[tuple[StepPlan, PendingResult]] = deque()
        # what the observer is yet to be told of, once the next step is under way
        self._untold: tuple[StepPlan, StepResult, list[TokenOutput], float] | None = None
        self._last: float | None = None  # when the result before was there, if there has been work since

    def add(self, request: Request) -> None:
        """Queue a request; RequestError if it could never run."""
        self.scheduler.add(request)
        self._observer.added(request)

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[TokenOutput]:
        """End requests now, wherever they are; returns what ended."""
        self.tell()
        outputs = self.scheduler.abort(request_ids, reason)
        self._observer.aborted(outputs)
        return outputs

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def idle(self) -> bool:
        """To be called while there is no work and nobody waits: lets the executor prepare later steps a little. Whether
        it did, so that there may be more to do."""
        prepare = getattr(self._runner, "idle", None)
        return not self.has_work and prepare is not None and bool(prepare())

    def step(self) -> list[TokenOutput]:
        """Keep `depth` steps in flight, wait for the oldest and return what it brought; [] when idle."""
        self._send()
        self.tell()
        if not self._in_flight:
            if self.scheduler.has_work:
                raise RuntimeError(f"the scheduler is stuck: {'; '.join(self.scheduler.trace.refusals) or 'no reason'}")
            return []
        plan, future = self._in_flight.popleft()
        asked = time.perf_counter()
        result = future.result()
        started = time.perf_counter()
        if self._last is not None:
            self._observe_visit(plan, result, started - self._last, started - asked)
        self._last = started
        outputs = self.scheduler.commit(plan, result)
        self._untold = plan, result, outputs, time.perf_counter() - started
        if self._is_awaited(plan, outputs):
            self._send()
        self.tell()
        if not self.has_work:
            self._last = None
        if self._always_check or not self.has_work:
            self.scheduler.check()
        return outputs

    def _observe_visit(self, plan: StepPlan, result: StepResult, seconds: float, waited: float) -> None:
        """A step ended `seconds` after the one before it, of which the host `waited` for it: tell what chooses how
        often such steps run at once."""
        if self._depth == 1 or not plan.generates:
            return
        visits, count, serial = self.scheduler.visits, plan.num_spans, self.scheduler.drafting.speculates
        if not serial:
            visits.observe(count, result.num_runs, seconds, waited)
        elif not result.warming:
            busy = result.times.forward + sum(each.seconds for each in result.draft_passes)
            visits.observe(count, result.num_runs, seconds, busy, serial=True)

    def _send(self) -> None:
        """Plan and start steps until `depth` are in flight, or no more can be planned."""
        while len(self._in_flight) < self._depth and self.scheduler.has_work:
            started = time.perf_counter()
            plan = self.scheduler.schedule()
            if not plan.num_spans:
                break
            self._observer.planned(plan, self.scheduler, time.perf_counter() - started)
            self._in_flight.append((plan, self._runner.execute(plan)))

    def _is_awaited(self, plan: StepPlan, outputs: list[TokenOutput]) -> bool:
        """Whether the next step is to be sent before anybody is told of this one. Where steps could overlap and this
        one's tokens had to be waited for, since drafts go on from them, a GPU has nothing to do until then."""
        if self._depth == 1 or self._in_flight or not self.scheduler.drafting.speculates or not self.has_work:
            return False
        # times of prompts are told to the moment
        return plan.generates and not any(news.finish_reason for news in outputs)

    def tell(self) -> None:
        """Whoever asks the observer wants to know of all steps that have ended: tell it of the last one."""
        if self._untold is not None:
            untold, self._untold = self._untold, None
            self._observer.committed(*untold)
