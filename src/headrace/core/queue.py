"""Admission order of waiting requests: a heap with removal in O(1).

A preempted request keeps its arrival, so it comes back before everything younger: no storms. A priority is a head
start: each step down stands for PATIENCE seconds of waiting, so whoever waits long enough comes before newcomers of any
class, and nobody starves. Batch work stands BATCH_PATIENCE behind in the same way, whatever the policy.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from headrace.core.request import Request

PATIENCE = 30.0  # seconds that one step of priority is worth
BATCH_PATIENCE = 60.0  # seconds of waiting for which batch work lets interactive requests go before it


class RequestQueue:
    """Waiting requests. `fcfs` ignores priorities; `priority` serves lower numbers first."""

    def __init__(self, policy: str = "fcfs"):
        if policy not in ("fcfs", "priority"):
            raise ValueError(f"scheduling policy must be fcfs or priority, not {policy!r}")
        self._by_priority = policy == "priority"
        self._heap: list[tuple[float, int, Request]] = []
        self._members: dict[str, Request] = {}

    def key(self, request: Request) -> tuple[float, int]:
        """Smaller is served first, and preempted last; no two requests have the same."""
        behind = BATCH_PATIENCE if request.batch else 0.0
        if self._by_priority:
            behind += request.priority * PATIENCE
        return (request.arrival + behind, request.order)

    def push(self, request: Request) -> None:
        self._members[request.id] = request
        heapq.heappush(self._heap, (*self.key(request), request))

    def peek(self) -> Request | None:
        """The request to be admitted next."""
        while self._heap and self._members.get(self._heap[0][2].id) is not self._heap[0][2]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        request = self.peek()
        if request is None:
            raise IndexError("no request is waiting")
        heapq.heappop(self._heap)
        del self._members[request.id]
        return request

    def remove(self, request_id: str) -> Request | None:
        """Take a request out wherever it stands."""
        return self._members.pop(request_id, None)

    def __iter__(self) -> Iterator[Request]:
        """Every waiting request, in no order."""
        return iter(self._members.values())

    def in_order(self) -> Iterator[Request]:
        """Every waiting request, next first; O(n log n), for explanations."""
        for _, _, request in sorted(self._heap, key=lambda entry: entry[:2]):
            if self._members.get(request.id) is request:
                yield request

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._members
