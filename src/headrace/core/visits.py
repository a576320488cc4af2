"""How often a step of decodes, or of verifications, runs before the host looks at it again. The scheduler asks; a
policy answers."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from headrace.core.kv_manager import KVCacheManager
from headrace.core.plan_builder import PlanBuilder

MOST_RUNS = 8  # of a step: workers that can run one more than once have room for so many results


class Visits(Protocol):
    """Chooses and learns from what became of it."""

    @property
    def follows(self) -> bool:
        """Whether drafts can be made between two runs, so that verifications may run several times."""
        ...

    def runs(self, num_rows: int, serial: bool = False) -> int:
        """Runs of a step of `num_rows` decodes or verifications, at least 1. `serial`: the step after it is not sent
        before its tokens are known, as where drafts go on from them."""
        ...

    def decisions(self) -> list[tuple[str, ...]]:
        """(what, chosen, reason, alternatives ...) of the last answer, for the ledger."""
        ...

    def observe(self, num_rows: int, num_runs: int, seconds: float, waited: float, serial: bool = False) -> None:
        """A step of `num_runs` runs of `num_rows` decodes or verifications ended `seconds` after the one before it, of
        which the host `waited` for it; of a `serial` one `waited` is what it took its device, drafting included."""
        ...


class OneRun:
    """Every run is looked at."""

    follows = False

    def runs(self, num_rows: int, serial: bool = False) -> int:
        return 1

    def decisions(self) -> list[tuple[str, ...]]:
        return []

    def observe(self, num_rows: int, num_runs: int, seconds: float, waited: float, serial: bool = False) -> None:
        pass


def repeat_runs(
    plan: PlanBuilder, visits: Visits, kv: KVCacheManager, max_len: int, limits: np.ndarray | None
) -> list[tuple[str, ...]]:
    """Give a step of decodes, or of verifications of equally many drafts, more runs, if they are wanted, all requests
    may have them, and memory is there for them; the decisions then. `max_len`: tokens that a request may have at most;
    `limits`: of what is drafted behind it."""
    depth = _depth(plan, limits) if plan.others else 0
    if plan.prefilling or (plan.others and not (depth and visits.follows)):
        return []
    serial = not plan.requests[0].runs_ahead  # as all that may run several times
    if serial and not depth and (limits is None or len(limits)):  # drafts come next, not the same again
        return []
    runs, length = visits.runs(len(plan.requests), serial), 1 + depth
    if runs < 2 or not all(request.repeats for request in plan.requests):
        return []
    left = max(request.max_len - start - 1 for request, start in zip(plan.requests, plan.starts, strict=True))
    # a verification brings a token at least, `length` at most: half of that, or the last runs would be in vain for all
    runs = min(runs, -(-2 * left // length) if depth else left, (max_len - max(plan.starts)) // length)
    if runs < 2:
        return []
    for request, start in zip(plan.requests, plan.starts, strict=True):
        if start + runs * length > request.num_slots:
            news = kv.allocate(request, start + runs * length, plan.copies)
            if news is None:  # nobody is preempted for it
                return []
            plan.new_blocks += news
    for request, start in zip(plan.requests, plan.starts, strict=True):
        request.num_scheduled = start + runs * length
    plan.num_runs = runs
    return [(what, str(runs), *why) for what, _, *why in visits.decisions()]


def _depth(plan: PlanBuilder, limits: np.ndarray | None) -> int:
    """The drafts that each span of a plan verifies, if it is a token and as many drafts in all of them, and as many
    again are to be made behind it by their proposer alone; else 0."""
    spans = set(plan.others.values())
    if len(plan.others) < len(plan.requests) or len(spans) > 1:
        return 0
    ((length, depth, yields),) = spans
    if not yields or length != 1 + depth:
        return 0
    if limits is None:
        return depth
    asked = np.flatnonzero(limits.any(axis=1)).tolist()
    if len(asked) != 1 or (limits[asked[0]] != depth).any():
        return 0
    return depth if all(request.draft_source == asked[0] for request in plan.requests) else 0
