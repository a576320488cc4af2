"""Prompt lookup (Saxena 2023): what followed the last time that the text ended as it does now.

Per row an index of every n-gram of the sequence so far, grown as tokens come: a proposal costs a few dictionary
look-ups whatever the length of the context. The longest n-gram that was seen before decides; past the end of what is
known the continuation repeats itself, as a loop does.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.plan import Admit
from headrace.spec.base import DraftContext, Drafts, padded

LONGEST, SHORTEST = 5, 2  # tokens of an n-gram; single tokens match too often by chance


class NgramProposer:
    """A `Proposer` (spec/base.py) that needs no network."""

    def __init__(self, num_tokens: int):
        if num_tokens < 1:
            raise ValueError(f"at least one token must be drafted, not {num_tokens}")
        self._num_tokens = num_tokens
        self._index: dict[int, dict[tuple[int, ...], int]] = {}  # row -> n-gram -> position after it
        self._indexed: dict[int, int] = {}  # row -> tokens whose n-grams are in the index

    def admit(self, admits: Sequence[Admit]) -> None:
        for admit in admits:
            self._index[admit.row] = {}
            self._indexed[admit.row] = 0

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._index.pop(row, None)
            self._indexed.pop(row, None)

    def propose(self, context: DraftContext) -> Drafts | None:
        return padded(
            [self._of_row(row, context, count) for row, count in zip(context.rows, context.limits, strict=True)]
        )

    def _of_row(self, row: int, context: DraftContext, limit: int) -> list[int]:
        length, limit = int(context.num_tokens[row]), min(limit, self._num_tokens)
        if limit < 1 or length <= SHORTEST:
            return []
        index, first = self._index[row], self._indexed[row]
        start = max(0, first - LONGEST)
        text: list[int] = context.token_ids[row, start:length].tolist()
        # the n-grams that end before the last token; the last ones are what is looked up, and indexed next time
        for end in range(max(first, SHORTEST), length):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                index[tuple(text[end - size - start : end - start])] = end
        self._indexed[row] = length
        for size in range(min(LONGEST, length - 1), SHORTEST - 1, -1):
            after = index.get(tuple(text[len(text) - size :]))
            if after is not None:
                known = context.token_ids[row, after:length].tolist()
                return [known[i % len(known)] for i in range(limit)]
        return []
