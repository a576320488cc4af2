"""StepBatch: the arrays of one step, as the model and the attention backend see them. Frozen once built."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace import ops
from headrace.core.plan import StepPlan
from headrace.ops.xp import Array
from headrace.worker.table import RequestTable


@dataclass(frozen=True)
class ShapeKey:
    """What a launcher keys a recorded step by."""

    mode: str  # eager, full, piecewise
    num_tokens: int  # padded
    num_rows: int  # padded
    query_len: int | None = None  # every span has this length; None: ragged


_NO_PLACES = np.zeros(0, np.int32)


@dataclass(frozen=True)
class StepBatch:
    """R spans over T tokens; G layer groups; B table columns; L positions whose logits are wanted."""

    key: ShapeKey
    rows: Array  # int32 [R]      request-table row of each span
    token_ids: Array  # int32 [T]
    positions: Array  # int32 [T]
    query_start: Array  # int32 [R+1]  span r is tokens query_start[r] : query_start[r+1]
    seq_lens: Array  # int32 [R]      tokens in the row's cache once this step has written its own
    block_tables: tuple[Array, ...]  # G x int32 [R, B]
    slot_mapping: tuple[Array, ...]  # G x int32 [T]  where each token's key and value go
    logit_index: Array  # int32 [L]      tokens whose logits are wanted
    logit_span: Array  # int32 [L]      the span each of them belongs to
    num_drafts: Array  # int32 [R]      the last num_drafts tokens of span r are drafts
    # int32 [P]  tokens followed by a prompt token whose log-probability is wanted, and the span of each
    prompt_index: Array = field(default_factory=lambda: _NO_PLACES)
    prompt_span: Array = field(default_factory=lambda: _NO_PLACES)
    # int32 [T]  of each token of a span that is a token tree, the place in its span of the token before it, -1 of its
    # first; of tokens of other spans -2; None: no span is one. Positions of a tree are depths, slots are in its order
    parents: Array | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_spans(self) -> int:
        return int(self.rows.shape[0])


def _logit_positions(plan: StepPlan, query_start: Array) -> tuple[Array, Array]:
    """(token, span) int32 [L] of each position whose logits are wanted."""
    spans = np.arange(plan.num_spans, dtype=np.int32)
    all_yield = bool(plan.yields.all())
    wanted = 1 + plan.num_drafts
    if not all_yield:
        wanted[~plan.yields] = 0
    logit_span = np.repeat(spans, wanted)
    if len(logit_span) == plan.num_tokens:  # all tokens: a step that verifies
        return np.arange(plan.num_tokens, dtype=np.int32), logit_span
    within = np.arange(len(logit_span), dtype=np.int32) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    return (query_start[1:] - wanted)[logit_span] + within, logit_span


class BatchBuilder:
    """Makes a StepBatch from a plan and the request table."""

    def __init__(self, table: RequestTable, block_size: int):
        self._table = table
        self._block_size = block_size
        self._numbers = np.arange(256, dtype=np.int32)  # nobody writes into them

    def build(self, plan: StepPlan, key: ShapeKey) -> StepBatch:
        """The arrays of `plan`; call after `table.apply(plan)`."""
        table, rows, lengths = self._table, plan.rows, plan.lengths
        if plan.num_decodes == plan.num_spans:
            return self._decodes(plan, key)
        token_ids, positions, query_start, seq_lens, slots = ops.build_step(
            rows, lengths, plan.num_tokens, table.token_ids, table.num_computed, table.block_tables, self._block_size
        )
        # a span that reaches the end of its row's tokens wants the logits of its last 1 + num_drafts positions
        logit_index, logit_span = _logit_positions(plan, query_start)
        parents = self._parents(plan, positions)
        prompt_index, prompt_span = self._prompt_positions(rows, lengths, positions)
        columns = -(-int(seq_lens.max()) // self._block_size)
        return StepBatch(
            key=key,
            rows=rows,
            token_ids=token_ids,
            positions=positions,
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=tuple(blocks[rows, :columns] for blocks in table.block_tables),
            slot_mapping=slots,
            logit_index=logit_index,
            logit_span=logit_span,
            num_drafts=plan.num_drafts,
            prompt_index=prompt_index,
            prompt_span=prompt_span,
            parents=parents,
        )

    def _decodes(self, plan: StepPlan, key: ShapeKey) -> StepBatch:
        """`build` where every span is one token that yields, in less time."""
        table, rows, count = self._table, plan.rows, plan.num_spans
        positions = table.num_computed[rows]
        seq_lens, columns = positions + 1, positions // self._block_size
        inside = positions - columns * self._block_size
        if count >= len(self._numbers):
            self._numbers = np.arange(2 * count, dtype=np.int32)
        wanted = int(columns.max()) + 1
        return StepBatch(
            key=key,
            rows=rows,
            token_ids=table.token_ids[rows, positions],
            positions=positions,
            query_start=self._numbers[: count + 1],
            seq_lens=seq_lens,
            block_tables=tuple(blocks[rows, :wanted] for blocks in table.block_tables),
            slot_mapping=tuple(blocks[rows, columns] * self._block_size + inside for blocks in table.block_tables),
            logit_index=self._numbers[:count],
            logit_span=self._numbers[:count],
            num_drafts=plan.num_drafts,
        )

    def _parents(self, plan: StepPlan, positions: Array) -> np.ndarray | None:
        """See StepBatch; `positions` of trees become depths."""
        found = self._table.tree_parents(plan)
        if found is None:
            return None
        first = 0
        for token in np.flatnonzero(found > -2).tolist():
            if found[token] < 0:
                first = token
            else:
                positions[token] = positions[first + found[token]] + 1
        return found

    def _prompt_positions(self, rows: Array, lengths: Array, positions: Array) -> tuple[np.ndarray, np.ndarray]:
        sampling = self._table.sampling
        wanted = sampling.prompt_logprobs[rows] >= 0
        if not wanted.any():
            return _NO_PLACES, _NO_PLACES
        span = np.repeat(np.arange(len(rows), dtype=np.int32), lengths)
        index = np.flatnonzero(wanted[span] & (positions + 1 < sampling.prompt_len[rows[span]]))
        return index.astype(np.int32), span[index]
