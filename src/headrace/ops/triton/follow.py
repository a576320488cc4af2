"""What a drafting network's first pass behind a verification runs, filled in on the GPU from what was accepted there.

A head: a span that brought n tokens, d drafts of it accepted and then one that was drawn (n = d + 1), gives the head n
entries: (feature of the span's token j, token j of those brought), j < n. The head's table and its step's buffers get
what the host would have sent, had it waited for the tokens.

A model: of the tokens that a row has then, all but the last two were computed by the passes of its last draft, whatever
was accepted of it. So its first pass runs the last two, in steps of the same sizes whatever was accepted; the first of
them mostly for the second time, which changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from headrace.ops.triton.runtime import kernel, launch_options, power_of_two
from headrace.ops.triton.step import COMPUTED, KNOWN, RECORD, SHIFT, Lines, StepSpans, TableView


@dataclass(frozen=True)
class Verified:
    """Where a step of the model leaves what a head continues; memory of fixed addresses."""

    view: TableView
    query_start: torch.Tensor  # int32 [max rows + 1]
    num_drafts: torch.Tensor  # int32 [max rows]  of each span
    drawn: torch.Tensor  # int32 [max rows, 1 + most drafts], see draw_and_commit
    features: torch.Tensor | None  # [max tokens, F], where a head asks for them


@kernel
def _follow(
    table, query_start, num_drafts, drawn, drawn_stride, own_table, own_tokens_at, own_stride, own_rows, own_num_rows,
    own_query_start, own_line_of, own_span_of, index,
    RECORD: tl.constexpr, KNOWN: tl.constexpr, COMPUTED: tl.constexpr, SHIFT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if span < tl.load(own_num_rows):
        columns = tl.arange(0, WIDTH)
        first = 0  # tokens that the spans before this one brought
        for at in tl.range(0, span, BLOCK):
            others = at + tl.arange(0, BLOCK)
            there = others < span
            most = tl.load(num_drafts + others, mask=there, other=0)[:, None]
            value = tl.load(
                drawn + others[:, None] * drawn_stride + columns[None, :],
                mask=there[:, None] & (columns[None, :] <= most), other=0,
            )  # fmt: skip
            count = tl.min(tl.where((value < 0) & (columns[None, :] <= most), columns[None, :], most + 1), axis=1)
            first += tl.sum(tl.where(there, tl.maximum(count, 1), 0), axis=0)
        drafts = tl.load(num_drafts + span)
        token = tl.load(drawn + span * drawn_stride + columns, mask=columns <= drafts, other=0)
        # where nothing could be drawn the table has a token all the same, and the request ends
        brought = tl.maximum(tl.min(tl.where((token < 0) & (columns <= drafts), columns, drafts + 1), axis=0), 1)
        mine = columns < brought
        row = tl.load(own_rows + span).to(tl.int64)
        record = own_table + row * RECORD
        # an entry's token stands SHIFT beyond it, and the model's row has computed all tokens but the last
        fed = tl.load(table + row * RECORD + COMPUTED) - brought - (tl.load(record + SHIFT) - 1)
        tl.store(record + COMPUTED, fed)
        tl.store(record + KNOWN, fed + brought)
        tl.store(own_table + own_tokens_at + row * own_stride + fed + columns, tl.maximum(token, 0), mask=mine)
        tl.store(own_query_start + span + 1, first + brought)
        tl.store(own_line_of + span, first + brought - 1)
        tl.store(own_span_of + first + columns, columns * 0 + span, mask=mine)
        tl.store(index + first + columns, tl.load(query_start + span) + columns, mask=mine)


@kernel
def _follow_tokens(
    table, tokens_at, tokens_stride, num_drafts, own_table, own_tokens_at, own_stride, rows, num_rows,
    RECORD: tl.constexpr, KNOWN: tl.constexpr, COMPUTED: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if span < tl.load(num_rows):
        columns = tl.arange(0, WIDTH)
        row = tl.load(rows + span).to(tl.int64)
        known = tl.load(table + row * RECORD + KNOWN)
        place = known - 1 - tl.load(num_drafts + span) + columns  # what the span brought ends with what is known
        mask = (place >= 0) & (place < known)
        token = tl.load(table + tokens_at + row * tokens_stride + place, mask=mask, other=0)
        tl.store(own_table + own_tokens_at + row * own_stride + place, token, mask=mask)
        tl.store(own_table + row * RECORD + KNOWN, known)
        tl.store(own_table + row * RECORD + COMPUTED, known - 2)


def follow_tokens(source: Verified, view: TableView, spans: StepSpans) -> None:
    """Make a model's step, whose spans are of two tokens of the rows of the step before, in its order, continue that
    one: `view` is the drafting model's table, which gets the tokens that have become known."""
    model = source.view
    _follow_tokens[(spans.rows.shape[0],)](
        model.words, model.tokens_at, model.max_len, source.num_drafts, view.words, view.tokens_at,
        view.max_len, spans.rows, spans.num_rows,
        RECORD=RECORD, KNOWN=KNOWN, COMPUTED=COMPUTED, WIDTH=power_of_two(source.drawn.shape[1], 2),
        **launch_options(num_warps=1),
    )  # fmt: skip


@kernel
def _hand_over(
    table, tokens_at, tokens_stride, rows, num_rows, made, made_stride, depth,
    RECORD: tl.constexpr, KNOWN: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if span < tl.load(num_rows):
        row = tl.load(rows + span).to(tl.int64)
        step = tl.arange(0, WIDTH)
        place = tl.load(table + row * RECORD + KNOWN) + step
        mask = (step < depth) & (place < tokens_stride)
        token = tl.load(made + step * made_stride + span, mask=mask, other=0)
        tl.store(table + tokens_at + row * tokens_stride + place, tl.maximum(token, 0), mask=mask)


def hand_over(source: Verified, spans: StepSpans, made: torch.Tensor) -> None:
    """Put drafts int32 [K, >= S] of a step's S spans behind the known tokens of the model's rows."""
    view = source.view
    _hand_over[(spans.rows.shape[0],)](
        view.words, view.tokens_at, view.max_len, spans.rows, spans.num_rows, made, made.stride(0), made.shape[0],
        RECORD=RECORD, KNOWN=KNOWN, WIDTH=power_of_two(made.shape[0], 2), **launch_options(num_warps=1),
    )  # fmt: skip


def follow(source: Verified, view: TableView, spans: StepSpans, lines: Lines, index: torch.Tensor) -> None:
    """Make a head's step, whose spans are of the rows of the step before, in its order, continue that one: `view` is
    the head's table; of `spans` and `lines` all but the rows is filled in, every token with a line. `index` int32 [T]
    gets the places of the entries' features."""
    _follow[(spans.rows.shape[0],)](
        source.view.words, source.query_start, source.num_drafts, source.drawn, source.drawn.stride(0),
        view.words, view.tokens_at, view.max_len, spans.rows, spans.num_rows, spans.query_start, lines.line_of,
        lines.span_of, index,
        RECORD=RECORD, KNOWN=KNOWN, COMPUTED=COMPUTED, SHIFT=SHIFT, WIDTH=power_of_two(source.drawn.shape[1], 2),
        BLOCK=32, **launch_options(num_warps=1),
    )  # fmt: skip
