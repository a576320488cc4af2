"""Prompt lookup (Saxena 2023): what followed the last time that the text ended as it does now.

Per row an index of every n-gram of the sequence so far, grown as tokens come: a proposal costs a few dictionary
look-ups whatever the length of the context. The longest n-gram that was seen before decides; past the end of what is
known the continuation repeats itself, as a loop does. In a tree each length of n-gram has a say, the longer the more.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.plan import Admit
from headrace.spec.base import DraftContext, Drafts, padded
from headrace.spec.tree import TokenTree, packed

LONGEST, SHORTEST = 5, 2  # tokens of an n-gram; single tokens match too often by chance
_WORTH = {2: 0.5, 3: 0.6, 4: 0.7, 5: 0.8}  # of each token that follows an n-gram of so many, where trees are compared


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
        known = context.num_tokens[context.rows].tolist()
        found = [
            self._of_row(row, length, context, count)
            for row, length, count in zip(context.rows.tolist(), known, context.limits, strict=True)
        ]
        if not context.nodes:
            return padded([paths[0][1] if paths else [] for paths in found])
        trees = []
        for paths in found:
            trees.append(TokenTree())
            for size, tokens in paths:
                trees[-1].add_path(tokens, [_WORTH[size] ** (depth + 1) for depth in range(len(tokens))])
        return packed(trees, context.nodes)

    def _of_row(self, row: int, length: int, context: DraftContext, limit: int) -> list[tuple[int, list[int]]]:
        """(size of n-gram, tokens that followed it) for a row of `length` known tokens, the longest first; all that
        there are only for trees."""
        limit = min(limit, self._num_tokens)
        if limit < 1 or length <= SHORTEST:
            return []
        index, first, tokens = self._index[row], self._indexed[row], context.token_ids[row]
        start = max(0, first - LONGEST)
        text: list[int] = tokens[start:length].tolist()
        # the n-grams that end before the last token; the last ones are what is looked up, and indexed next time
        for end in range(max(first, SHORTEST), length):
            last = end - start
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                index[tuple(text[last - size : last])] = end
        self._indexed[row] = length
        paths: list[tuple[int, list[int]]] = []
        for size in range(min(LONGEST, length - 1), SHORTEST - 1, -1):
            after = index.get(tuple(text[len(text) - size :]))
            if after is not None:
                known: list[int] = tokens[after : min(length, after + limit)].tolist()
                if len(known) < limit:
                    known = [known[i % len(known)] for i in range(limit)]
                paths.append((size, known))
                if not context.nodes:
                    break
        return paths
