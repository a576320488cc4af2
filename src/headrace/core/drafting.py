"""How many drafts a worker makes, by which proposer, and how many of them a step verifies. The scheduler asks; a policy
answers.

The engine's proposers have numbers, in the order in which a worker asks them: the first one that has drafts for a
request is the one whose drafts it gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import Request


class DraftPolicy(Protocol):
    """Chooses depths and learns from what became of the drafts."""

    @property
    def speculates(self) -> bool:
        """False: there are no drafts, and requests may run ahead of their results."""
        ...

    def may_plan(self, requests: Iterable[Request], num_in_flight: int) -> bool:
        """Whether a step may be planned beside those in flight. Where this changes `speculates`, which it may while
        there are none, it says so to the `requests` (Request.runs_ahead)."""
        ...

    def depth(self, request: Request, available: int, num_rows: int) -> int:
        """Drafts of `request` to verify in a step with `num_rows` decoding requests; 0 to `available`."""
        ...

    def limits(self, requests: Sequence[Request], num_rows: int) -> np.ndarray | None:
        """int32 [proposers, spans]: the most drafts that each proposer may make after a step whose spans are of these
        requests; without rows none is asked; None: no bound."""
        ...

    def decisions(self) -> list[tuple[str, ...]]:
        """(what, chosen, reason, alternatives ...) of this step, for the ledger."""
        ...

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """`num_drafts` of the request were verified, the first `num_accepted` of them were right."""
        ...

    def observe_step(self, plan: StepPlan, result: StepResult) -> None:
        """A step committed."""
        ...


class NoDrafts:
    """Nothing is ever drafted."""

    speculates = False

    def may_plan(self, requests: Iterable[Request], num_in_flight: int) -> bool:
        return True

    def depth(self, request: Request, available: int, num_rows: int) -> int:
        return 0

    def limits(self, requests: Sequence[Request], num_rows: int) -> np.ndarray | None:
        return None

    def decisions(self) -> list[tuple[str, ...]]:
        return []

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        pass

    def observe_step(self, plan: StepPlan, result: StepResult) -> None:
        pass


class FixedDepth:
    """All that there are, up to a number."""

    speculates = True

    def __init__(self, most: int, proposers: Sequence[str] = ("ngram",), nodes: int = 0):
        """`nodes`: of drafts that are trees, of which `most` is the depth; 0: drafts are chains."""
        self._most = most
        self._most_verified = nodes or most
        self._proposers = proposers

    def may_plan(self, requests: Iterable[Request], num_in_flight: int) -> bool:
        return not num_in_flight  # drafts continue what it brings

    def depth(self, request: Request, available: int, num_rows: int) -> int:
        return min(available, self._most_verified)

    def limits(self, requests: Sequence[Request], num_rows: int) -> np.ndarray | None:
        if all(request.params.draft_method is None for request in requests):
            return None
        allowed = [[allows(request, name) for request in requests] for name in self._proposers]
        return np.array(allowed, np.int32) * self._most

    def decisions(self) -> list[tuple[str, ...]]:
        return []

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        pass

    def observe_step(self, plan: StepPlan, result: StepResult) -> None:
        pass


class Verified(NamedTuple):
    """What became of the drafts of one span."""

    source: int  # the proposer
    num_drafts: int
    num_accepted: int


def note_verified(policy: DraftPolicy, request: Request, num_drafts: int, num_accepted: int) -> Verified:
    """Tell the policy and the request's account."""
    request.drafts_verified += num_drafts
    request.drafts_accepted += num_accepted
    policy.observe(request, num_drafts, num_accepted)
    return Verified(request.draft_source, num_drafts, num_accepted)


def note_runs(
    policy: DraftPolicy, request: Request, num_drafts: int, runs: Sequence[int], num_told: int
) -> list[Verified]:
    """The same of a span that verified so many drafts in every run, and accepted `runs` of them; of runs behind the one
    that brought the last of the `num_told` tokens that count, since they end the request, nothing is noted."""
    noted: list[Verified] = []
    brought = 0
    for accepted in runs:
        if brought >= num_told and noted:
            break
        noted.append(note_verified(policy, request, num_drafts, accepted))
        brought += 1 + accepted
    return noted


def allows(request: Request, proposer: str) -> bool:
    """Whether the request leaves its drafts to this proposer."""
    return request.params.draft_method in (None, proposer)


def expected_tokens(acceptance: float, depth: int) -> float:
    """Tokens that a verification of `depth` drafts brings, each accepted with probability `acceptance`."""
    if acceptance >= 1.0:
        return depth + 1.0
    return (1.0 - acceptance ** (depth + 1)) / (1.0 - acceptance)


def break_even(depth: int, cost: float) -> float:
    """The acceptance at which `depth` drafts bring what they cost: steps of `cost` times the time of a step without
    drafts bring `cost` times the tokens. 1 where nothing is enough."""
    low, high = 0.0, 1.0
    if cost >= depth + 1:
        return 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, depth) < cost else (low, middle)
    return high
