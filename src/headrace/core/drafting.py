"""How many of the drafts that a worker holds a step should verify. The scheduler asks; a policy answers."""

from __future__ import annotations

from typing import Protocol

from headrace.core.request import Request


class DraftPolicy(Protocol):
    """Chooses depths and learns from what became of the drafts."""

    speculates: bool  # false: there are no drafts, and requests may run ahead of their results

    def depth(self, request: Request, available: int, num_rows: int) -> int:
        """Drafts of `request` to verify in a step with `num_rows` decoding requests; 0 to `available`."""
        ...

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """`num_drafts` of the request were verified, the first `num_accepted` of them were right."""
        ...


class NoDrafts:
    """Nothing is ever drafted."""

    speculates = False

    def depth(self, request: Request, available: int, num_rows: int) -> int:
        return 0

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        pass


class FixedDepth:
    """All that there are, up to a number."""

    speculates = True

    def __init__(self, most: int):
        self._most = most

    def depth(self, request: Request, available: int, num_rows: int) -> int:
        return min(available, self._most)

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        pass
