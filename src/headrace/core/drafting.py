"""How many drafts a worker makes, by which proposer, and how many of them a step verifies. The scheduler asks; a policy
answers.

The engine's proposers have numbers, in the order in which a worker asks them: the first one that has drafts for a
request is the one whose drafts it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from headrace.core.plan import DraftPass
from headrace.core.request import Request

Spans = Sequence[tuple[Request, int]]  # (request, epoch) of each span of a step


class DraftPolicy(Protocol):
    """Chooses depths and learns from what became of the drafts."""

    speculates: bool  # false: there are no drafts, and requests may run ahead of their results

    def depth(self, request: Request, available: int, num_rows: int) -> int:
        """Drafts of `request` to verify in a step with `num_rows` decoding requests; 0 to `available`."""
        ...

    def limits(self, spans: Spans, num_rows: int) -> np.ndarray | None:
        """int32 [proposers, spans]: the most drafts that each proposer may make after this step; None: no bound."""
        ...

    def decisions(self) -> list[tuple[str, ...]]:
        """(what, chosen, reason, alternatives ...) of this step, for the ledger."""
        ...

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """`num_drafts` of the request were verified, the first `num_accepted` of them were right."""
        ...

    def observe_passes(self, passes: Sequence[DraftPass]) -> None:
        """What the passes of a drafting network took."""
        ...


class NoDrafts:
    """Nothing is ever drafted."""

    speculates = False

    def depth(self, request: Request, available: int, num_rows: int) -> int:
        return 0

    def limits(self, spans: Spans, num_rows: int) -> np.ndarray | None:
        return None

    def decisions(self) -> list[tuple[str, ...]]:
        return []

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        pass

    def observe_passes(self, passes: Sequence[DraftPass]) -> None:
        pass


class FixedDepth:
    """All that there are, up to a number."""

    speculates = True

    def __init__(self, most: int, proposers: Sequence[str] = ("ngram",)):
        self._most = most
        self._proposers = proposers

    def depth(self, request: Request, available: int, num_rows: int) -> int:
        return min(available, self._most)

    def limits(self, spans: Spans, num_rows: int) -> np.ndarray | None:
        if all(request.params.draft_method is None for request, _ in spans):
            return None
        allowed = [[allows(request, name) for request, _ in spans] for name in self._proposers]
        return np.array(allowed, np.int32) * self._most

    def decisions(self) -> list[tuple[str, ...]]:
        return []

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        pass

    def observe_passes(self, passes: Sequence[DraftPass]) -> None:
        pass


def allows(request: Request, proposer: str) -> bool:
    """Whether the request leaves its drafts to this proposer."""
    return request.params.draft_method in (None, proposer)
