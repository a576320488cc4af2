"""Who is let in beyond the queue's bound: limits for each API key, and first tokens that would come too late."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict

from headrace.server.errors import ApiError

MOST_RETRY_AFTER = 60  # seconds


def retry_after(seconds: float) -> str:
    """For the header of that name."""
    return str(min(MOST_RETRY_AFTER, max(1, math.ceil(seconds))))


class CallerLimit:
    """Choices that each caller has in the engine, at most `most` at once; 0: any number."""

    def __init__(self, most: int):
        self._most = most
        self._alive: Counter[str] = Counter()

    def take(self, caller: str | None, count: int) -> None:
        """`count` more of a caller; ApiError 429 if they are too many. `give` must follow."""
        if caller is None:
            return
        alive = self._alive[caller]
        if self._most and alive + count > self._most:
            if not alive:
                del self._alive[caller]
            raise ApiError(
                429,
                f"this API key has {alive} choices in the engine and may have {self._most} at once; "
                f"{count} more are too many: wait for some to end",
                code="key_limit",
                headers={"retry-after": "1"},
            )
        self._alive[caller] += count

    def give(self, caller: str | None, count: int) -> None:
        """They have ended."""
        if caller is None:
            return
        self._alive[caller] -= count
        if self._alive[caller] <= 0:
            del self._alive[caller]


class Owners:
    """Whose request an id names, of the latest `most`."""

    def __init__(self, most: int = 8192):
        self._most = most
        self._of: OrderedDict[str, str] = OrderedDict()

    def note(self, request_id: str, caller: str | None) -> None:
        if caller is not None:
            self._of[request_id] = caller
            if len(self._of) > self._most:
                self._of.popitem(last=False)

    def may_see(self, request_id: str, caller: str | None) -> bool:
        """Without API keys (`caller` is None) everybody may; else only who sent it. Ids of a prompt (ID.1) or a choice
        (ID/0) belong to their request."""
        return caller is None or self._of.get(request_id.partition("/")[0].partition(".")[0]) == caller


def check_first_token(backlog: float, objective: float | None, batch: bool) -> None:
    """ApiError 429 if the prompts before it are predicted to take longer than a first token may."""
    if objective is None or batch or backlog <= objective:
        return
    raise ApiError(
        429,
        f"a first token is predicted to come after {backlog:.1f} s, beyond the objective of {objective:g} s "
        "(ttft_slo); try again later, or send it as batch work (service_tier flex)",
        code="first_token_late",
        headers={"retry-after": retry_after(backlog - objective)},
    )
