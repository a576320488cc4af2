"""How often a step of decodes runs before the host looks at it again. The scheduler asks; a policy answers."""

from __future__ import annotations

from typing import Protocol

from headrace.core.kv_manager import KVCacheManager
from headrace.core.plan_builder import PlanBuilder

MOST_RUNS = 8  # of a step: workers that can run one more than once have room for so many results


class Visits(Protocol):
    """Chooses and learns from what became of it."""

    def runs(self, num_rows: int) -> int:
        """Runs of a step of `num_rows` decodes, at least 1."""
        ...

    def decisions(self) -> list[tuple[str, ...]]:
        """(what, chosen, reason, alternatives ...) of the last answer, for the ledger."""
        ...

    def observe(self, num_rows: int, num_runs: int, seconds: float, waited: float) -> None:
        """A step of `num_runs` runs of `num_rows` decodes ended `seconds` after the one before it, of which the host
        `waited` for it."""
        ...


class OneRun:
    """Every run is looked at."""

    def runs(self, num_rows: int) -> int:
        return 1

    def decisions(self) -> list[tuple[str, ...]]:
        return []

    def observe(self, num_rows: int, num_runs: int, seconds: float, waited: float) -> None:
        pass


def repeat_runs(plan: PlanBuilder, visits: Visits, kv: KVCacheManager, max_len: int) -> list[tuple[str, ...]]:
    """Give a step of decodes more runs, if they are wanted, all requests may have them, and memory is there for them;
    the decisions then. `max_len`: tokens that a request may have at most."""
    runs = visits.runs(len(plan.requests))
    if runs < 2 or plan.others or plan.prefilling or not all(request.repeats for request in plan.requests):
        return []
    of_use = max(request.max_len - start - 1 for request, start in zip(plan.requests, plan.starts, strict=True))
    runs = min(runs, of_use, max_len - max(plan.starts))
    if runs < 2:
        return []
    for request, start in zip(plan.requests, plan.starts, strict=True):
        if start + runs > request.num_slots:
            news = kv.allocate(request, start + runs, plan.copies)
            if news is None:  # nobody is preempted for it
                return []
            plan.new_blocks += news
    for request, start in zip(plan.requests, plan.starts, strict=True):
        request.num_scheduled = start + runs
    plan.num_runs = runs
    return visits.decisions()
