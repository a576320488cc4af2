"""Drafts of no meaning, for benchmarks whose acceptance is chosen (sampling/residual.py, SyntheticSampler)."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.plan import Admit
from headrace.spec.base import DraftContext, Drafts, padded


class SyntheticProposer:
    """A `Proposer` (spec/base.py) that always repeats the last token."""

    def __init__(self, num_tokens: int):
        self._num_tokens = num_tokens

    def admit(self, admits: Sequence[Admit]) -> None:
        pass

    def release(self, rows: Sequence[int]) -> None:
        pass

    def propose(self, context: DraftContext) -> Drafts | None:
        last = context.token_ids[context.rows, context.num_tokens[context.rows] - 1].tolist()
        counts = [min(limit, self._num_tokens) for limit in context.limits]
        return padded([[token] * count for token, count in zip(last, counts, strict=True)])
