"""Executor: where workers run. The engine core sees plans going in and futures of results coming out."""

from __future__ import annotations

from typing import Protocol

from headrace.core.loop import PendingResult
from headrace.core.plan import StepPlan


class Executor(Protocol):
    """One model, on one or many workers."""

    def execute(self, plan: StepPlan) -> PendingResult:
        """Start a step; steps complete in the order of the calls."""
        ...

    def stop(self) -> None:
        """Release everything; no call may follow."""
        ...
