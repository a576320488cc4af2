"""Executor: where workers run. The engine core sees plans going in and futures of results coming out."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from headrace.core.plan import StepPlan, StepResult


class Executor(Protocol):
    """One model, on one or many workers."""

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step; futures complete in the order of the calls."""
        ...

    def stop(self) -> None:
        """Release everything; no call may follow."""
        ...
