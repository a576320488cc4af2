"""The worker in this process: on a CPU a step runs when it is executed; on a GPU it is sent, and waited for later."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from headrace.core.loop import PendingResult
from headrace.core.plan import StepPlan, StepResult


class AnyWorker(Protocol):
    """A worker of whatever device."""

    def execute(self, plan: StepPlan) -> StepResult | PendingResult:
        """Run one step, or start it."""
        ...

    def stop(self) -> None:
        """Let go of everything."""
        ...


class InProcessExecutor:
    """Runs steps in the calling thread."""

    def __init__(self, worker: AnyWorker):
        self._worker = worker

    def execute(self, plan: StepPlan) -> PendingResult:
        future: Future[StepResult] = Future()
        try:
            outcome = self._worker.execute(plan)
        except Exception as error:
            future.set_exception(error)
            return future
        if not isinstance(outcome, StepResult):
            return outcome
        future.set_result(outcome)
        return future

    def idle(self) -> bool:
        """Nothing is in flight, and nobody waits: the worker may do a little of what prepares later steps, as long as
        one takes on a GPU's graph. Whether it did, so that there may be more."""
        prepare = getattr(self._worker, "idle", None)
        return prepare is not None and bool(prepare())

    def stop(self) -> None:
        self._worker.stop()
