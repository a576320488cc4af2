"""Stop strings over text that arrives in pieces.

One Knuth-Morris-Pratt automaton per string, advanced a character at a time: its state is how much of the string the
text so far ends with, which is exactly what must be held back, since it may turn out to belong to a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


def _failure_table(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper border."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        length += pattern[index] == pattern[length]
        table[index] = length
    return table


class StopStrings:
    """Finds the first stop string in a growing text."""

    def __init__(self, patterns: Sequence[str]):
        self._patterns = list(patterns)
        self._tables = [_failure_table(pattern) for pattern in self._patterns]
        self._states = [0] * len(self._patterns)
        self._beginnings = frozenset(pattern[:1] for pattern in self._patterns)
        self.held = 0  # characters at the end of the text that may belong to a stop string: the largest state

    def feed(self, piece: str, allowed: bool = True) -> tuple[int, int] | None:
        """Advance over `piece`; the first stop string that it completes as (its length, characters of `piece` used).

        Of strings completed by the same character the longest counts: its text begins first. With `allowed` false,
        strings completed here are passed over.
        """
        if not self.held and self._beginnings.isdisjoint(piece):  # as nearly all pieces
            return None
        for used, character in enumerate(piece, start=1):
            longest = 0
            for index, pattern in enumerate(self._patterns):
                state, table = self._states[index], self._tables[index]
                while state and (state == len(pattern) or character != pattern[state]):
                    state = table[state - 1]
                state += character == pattern[state]
                self._states[index] = state
                if state == len(pattern):
                    longest = max(longest, state)
                    if not allowed:  # passed over: it can only begin again inside itself
                        self._states[index] = table[state - 1]
            if longest and allowed:
                self.held = max(self._states)
                return longest, used
        self.held = max(self._states, default=0)
        return None
