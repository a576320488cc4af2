"""RequestTable: the worker's persistent state of every row, from admission to release."""

from __future__ import annotations

import numpy as np

from headrace.core.plan import StepPlan
from headrace.sampling.sampler import Sampled
from headrace.sampling.state import SamplingTable
from headrace.spec.base import Drafts


class RequestTable:
    """Columns over `max_rows` rows. Memory of long rows is touched only as they grow."""

    def __init__(self, max_rows: int, max_len: int, num_groups: int, block_size: int):
        self.token_ids = np.zeros((max_rows, max_len), np.int32)  # known tokens, then drafts
        self.num_tokens = np.zeros(max_rows, np.int32)  # known tokens
        self.num_computed = np.zeros(max_rows, np.int32)  # tokens whose KV is in the cache
        self.block_tables = tuple(np.zeros((max_rows, -(-max_len // block_size)), np.int32) for _ in range(num_groups))
        self.sampling = SamplingTable(max_rows)
        # of the drafts of a row that are a tree, the places of their parents: 0 the last known token, i + 1 draft i
        self.draft_parents: list[np.ndarray | None] = [None] * max_rows

    def apply(self, plan: StepPlan) -> None:
        """Take in what the scheduler decided, before the step runs."""
        for admit in plan.admits:
            row, count = admit.row, len(admit.token_ids)
            self.token_ids[row, :count] = admit.token_ids
            self.num_tokens[row] = count
            self.num_computed[row] = admit.num_computed
            self.sampling.set(admit)
        if plan.forks:
            sources, rows, tokens = np.array(plan.forks, np.int32).T
            counts = self.num_tokens[sources]
            self.token_ids[rows, : counts.max()] = self.token_ids[sources, : counts.max()]
            self.token_ids[rows, counts - 1] = tokens
            self.num_tokens[rows], self.num_computed[rows] = counts, self.num_computed[sources]
        for row, group, start, ids in plan.new_blocks:
            if len(ids) == 1:  # a row that grows; many do in a step
                self.block_tables[group][row, start] = ids[0]
            else:
                self.block_tables[group][row, start : start + len(ids)] = ids

    def commit(self, plan: StepPlan, sampled: Sampled) -> None:
        """Take in what the step sampled: tokens become known, rejected drafts are forgotten."""
        rows, counts = plan.rows, sampled.counts
        known, last = self.num_tokens[rows], self.token_ids.shape[1] - 1
        if sampled.tokens.shape[1] == 1 and counts.all():
            self.num_computed[rows] += 1 if plan.num_decodes == plan.num_spans else plan.lengths - plan.num_drafts
            self.token_ids[rows, np.minimum(known, last)] = sampled.tokens[:, 0]
        else:
            self.num_computed[rows] += plan.lengths - np.where(counts > 0, plan.num_drafts + 1 - counts, 0)
            span, column = (np.arange(sampled.tokens.shape[1]) < counts[:, None]).nonzero()
            places = np.minimum(known[span] + column, last)
            self.token_ids[rows[span], places] = sampled.tokens[span, column]
        self.num_tokens[rows] = known + counts

    def tree_parents(self, plan: StepPlan) -> np.ndarray | None:
        """int32 [T], as StepBatch has them, of the tokens of a plan; None: no span is a tree."""
        found: np.ndarray | None = None
        for span in plan.num_drafts.nonzero()[0].tolist():
            parents = self.draft_parents[int(plan.rows[span])]
            count = int(plan.num_drafts[span])
            if parents is None or (parents[:count] == np.arange(count)).all():
                continue
            if found is None:
                found = np.full(plan.num_tokens, -2, np.int32)
                starts = np.cumsum(plan.lengths) - plan.lengths
            first = int(starts[span])
            found[first], found[first + 1 : first + 1 + count] = -1, parents[:count]
        return found

    def hold_drafts(self, rows: np.ndarray, drafts: Drafts | None) -> np.ndarray:
        """Keep proposed tokens behind the known ones of `rows`, for a step to verify; how many of each, int32 [R]."""
        if drafts is None:
            return np.zeros(len(rows), np.int32)
        known = self.num_tokens[rows]
        self.sampling.draft_start[rows] = known
        width = drafts.tokens.shape[1]
        there = drafts.tokens >= 0
        if int(known.max()) + width > self.token_ids.shape[1]:
            there &= np.arange(width) < (self.token_ids.shape[1] - known)[:, None]
        counts = np.count_nonzero(there, axis=1).astype(np.int32)
        span, column = there.nonzero()
        self.token_ids[rows[span], known[span] + column] = drafts.tokens[there]
        numbers = rows.tolist()
        for index, row in enumerate(numbers):
            self.sampling.draft_probs[row] = drafts.probs[index] if drafts.probs is not None else None
            self.draft_parents[row] = None
        if drafts.tree is not None:
            for index, row in enumerate(numbers):
                parents = drafts.tree[index, : counts[index]] + 1
                if not (parents == np.arange(len(parents))).all():
                    self.draft_parents[row] = parents
        return counts


def told_of(
    plan: StepPlan, drafts: Drafts | None, held: np.ndarray
) -> tuple[list[int], list[int], dict[int, list[float]]]:
    """What a StepResult says of the drafts for the rows of a plan that yield, of which `held` are kept: how many each
    span's row has, by which proposer, and what nodes of trees promise."""
    counts, sources = held, None if drafts is None else drafts.sources
    if not plan.yields.all():
        counts = _spread(held, plan.yields)
        sources = None if sources is None else _spread(sources, plan.yields)
    promised: dict[int, list[float]] = {}
    if drafts is not None and drafts.values is not None:
        for index, span in enumerate(np.flatnonzero(plan.yields).tolist()):
            promised[span] = drafts.values[index, : counts[span]].tolist()
    return counts.tolist(), [0] * plan.num_spans if sources is None else sources.tolist(), promised


def _spread(values: np.ndarray, yields: np.ndarray) -> np.ndarray:
    """Values of the spans that yield, among all; 0 of others."""
    spread = np.zeros(len(yields), np.int32)
    spread[yields] = values
    return spread
