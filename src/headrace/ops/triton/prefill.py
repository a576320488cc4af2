"""Attention of many queries a row over head-major pages: FlashAttention-2 (Dao 2023) over ragged spans whose prefix is
in the pages, the query heads that share a key head packed into one tile."""

from __future__ import annotations

import torch
import triton.language as tl

from headrace.ops.triton.paged import HeadShape, PagedRows, Scores
from headrace.ops.triton.runtime import INTERPRETED, kernel, launch_options, power_of_two
from headrace.ops.triton.softmax import softmax_step

STEP = 64  # keys that a program takes at a time


@kernel
def _prefill(
    q, key_pages, value_pages, out, block_tables, rows, query_start, seq_lens, tile_span, tile_first, sinks,
    table_stride, scale, cap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    CAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # the last tiles of a span see the most keys: they start first
    number, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    shared: tl.constexpr = HEADS // KV_HEADS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    span = tl.load(tile_span + number)
    if span < 0:  # a tile of padding
        return
    first_query = tl.load(tile_first + number)
    length = tl.load(seq_lens + span)
    start = tl.load(query_start + span)
    num_queries = tl.load(query_start + span + 1) - start
    table = block_tables + tl.load(rows + span).to(tl.int64) * table_stride
    lane = tl.arange(0, TILE)
    query, mate = first_query + lane // shared, lane % shared
    known = (query < num_queries) & (lane < TILE // shared * shared)
    q_head = head * shared + mate
    index = tl.arange(0, WIDTH)
    place = (start + query).to(tl.int64)[:, None] * (HEADS * DIM) + q_head[:, None] * DIM + index[None, :]
    mask = known[:, None] & (index < DIM)[None, :]
    tile = tl.load(q + place, mask=mask, other=0.0)
    position = length - num_queries + query
    lowest = length - num_queries + first_query
    end = tl.minimum(lowest + TILE // shared, length)  # one past the last key that any query of the tile sees
    begin = 0
    if WINDOW:
        begin = tl.maximum(lowest - window + 1, 0) // STEP * STEP
    best = tl.full((TILE,), float("-inf"), tl.float32)
    norm = tl.zeros((TILE,), tl.float32)
    sums = tl.zeros((TILE, WIDTH), tl.float32)
    # keys up to `plain` are seen by every query of the tile: no mask
    plain = begin
    if not WINDOW:
        plain = (lowest + 1) // STEP * STEP
    for at in tl.range(begin, plain, STEP, num_stages=STAGES):
        key = at + tl.arange(0, STEP)
        block = tl.load(table + key // PAGE).to(tl.int64)
        source = ((block * KV_HEADS + head) * PAGE + key % PAGE) * DIM
        if WIDTH == DIM:
            keys = tl.load(key_pages + source[:, None] + index[None, :])
            values = tl.load(value_pages + source[:, None] + index[None, :])
        else:
            take = (index < DIM)[None, :] & (key >= 0)[:, None]
            keys = tl.load(key_pages + source[:, None] + index[None, :], mask=take, other=0.0)
            values = tl.load(value_pages + source[:, None] + index[None, :], mask=take, other=0.0)
        score = tl.dot(tile, tl.trans(keys), input_precision="ieee") * scale
        if CAP:
            score = cap * (2.0 / (1.0 + tl.exp(-2.0 * score / cap)) - 1.0)
        score = score * 1.4426950408889634
        best, norm, sums = softmax_step(score, values, best, norm, sums, False)
    for at in tl.range(plain, end, STEP):
        key = at + tl.arange(0, STEP)
        real = key < end
        block = tl.load(table + key // PAGE, mask=real, other=0).to(tl.int64)
        source = ((block * KV_HEADS + head) * PAGE + key % PAGE) * DIM
        take = real[:, None] & (index < DIM)[None, :]
        keys = tl.load(key_pages + source[:, None] + index[None, :], mask=take, other=0.0)
        values = tl.load(value_pages + source[:, None] + index[None, :], mask=take, other=0.0)
        score = tl.dot(tile, tl.trans(keys), input_precision="ieee") * scale
        if CAP:
            score = cap * (2.0 / (1.0 + tl.exp(-2.0 * score / cap)) - 1.0)
        seen = real[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        score = tl.where(seen, score * 1.4426950408889634, float("-inf"))
        best, norm, sums = softmax_step(score, values, best, norm, sums, True)
    if SINKS:
        sink = tl.load(sinks + q_head, mask=known, other=0.0) * 1.4426950408889634
        safe = tl.where(best == float("-inf"), 0.0, best)
        norm += tl.exp2(sink - safe)
    result = sums / tl.where(norm == 0.0, 1.0, norm)[:, None]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


def prefill_tile(shape: HeadShape) -> int:
    """Queries of a tile of `prefill_attention`; its rows are these times the heads that share a key head."""
    shared = shape.num_heads // shape.num_kv_heads
    return max(1, _prefill_rows(shape) // shared)


def _prefill_rows(shape: HeadShape) -> int:
    shared = shape.num_heads // shape.num_kv_heads
    return power_of_two(shared, 16 if INTERPRETED else 128 if shape.head_dim <= 128 else 64)


def prefill_attention(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    paged: PagedRows,
    tiles: tuple[torch.Tensor, torch.Tensor],
    shape: HeadShape,
    scores: Scores,
    out: torch.Tensor,
) -> None:
    """Attention of spans of any length: q and out [T, heads * D]. `tiles`: the span of each tile (-1: padding) and the
    first of its queries in the span, int32 [tiles]; a tile has `prefill_tile(shape)` queries."""
    key_pages, value_pages = cache
    width = power_of_two(shape.head_dim, 16)
    # keys wait for their block's number, so a pipeline of 2n + 1 stages holds n tiles of keys and values
    stages = 2 if q.element_size() > 2 else 7 if width == 128 else 5
    _prefill[(tiles[0].shape[0], shape.num_kv_heads)](
        q, key_pages, value_pages, out, paged.block_tables, paged.rows, paged.query_start, paged.seq_lens, *tiles,
        q if scores.sinks is None else scores.sinks, paged.block_tables.stride(0), scores.scale,
        scores.soft_cap or 1.0, scores.window,
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, DIM=shape.head_dim,
        WIDTH=width, PAGE=key_pages.shape[2], TILE=_prefill_rows(shape), STEP=STEP,
        STAGES=stages, CAP=scores.soft_cap is not None, WINDOW=scores.window > 0, SINKS=scores.sinks is not None,
        **launch_options(8 if shape.head_dim >= 64 else 4, stages),
    )  # fmt: skip
