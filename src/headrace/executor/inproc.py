"""The worker in this process: a step runs when it is executed, and its future is done on return."""

from __future__ import annotations

from concurrent.futures import Future

from headrace.core.plan import StepPlan, StepResult
from headrace.worker.worker import Worker


class InProcessExecutor:
    """Runs steps in the calling thread."""

    def __init__(self, worker: Worker):
        self._worker = worker

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        try:
            future.set_result(self._worker.execute(plan))
        except Exception as error:
            future.set_exception(error)
        return future

    def stop(self) -> None:
        self._worker.stop()
