"""StepBatch: the arrays of one step, as the model and the attention backend see them. Frozen once built."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.ops.xp import Array


@dataclass(frozen=True)
class ShapeKey:
    """What a launcher keys a recorded step by."""

    mode: str  # eager, full, piecewise
    num_tokens: int  # padded
    num_rows: int  # padded
    query_len: int | None = None  # every span has this length; None: ragged


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

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_spans(self) -> int:
        return int(self.rows.shape[0])
