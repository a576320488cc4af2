"""Store: answers of /v1/responses that later requests may go on from. In memory, bounded in number and size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 64 << 20  # of all answers with their conversations, about


@dataclass(frozen=True)
class Stored:
    """An answer."""

    body: bytes  # as it was sent
    messages: Sequence[Mapping[str, Any]]  # the conversation up to it, the answer included, instructions not
    caller: str | None  # whose it is
    size: int  # bytes, about


class Store:
    """The latest answers. Each belongs to the API key that asked for it: others are told that there is none."""

    def __init__(self, most: int, max_bytes: int = MAX_BYTES):
        self._most, self._max_bytes = most, max_bytes
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response_id: str, stored: Stored) -> None:
        """Keep an answer; the oldest go."""
        self._kept[response_id] = stored
        self.num_bytes += stored.size
        while self._kept and (len(self._kept) > self._most or self.num_bytes > self._max_bytes):
            self.num_bytes -= self._kept.popitem(last=False)[1].size

    def get(self, response_id: str, caller: str | None) -> Stored | None:
        found = self._kept.get(response_id)
        return found if found is not None and found.caller == caller else None

    def drop(self, response_id: str, caller: str | None) -> bool:
        """Whether it was there."""
        if self.get(response_id, caller) is None:
            return False
        self.num_bytes -= self._kept.pop(response_id).size
        return True
