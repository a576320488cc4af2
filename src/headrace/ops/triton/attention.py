"""Attention over head-major pages: few queries a row with the context split (decode), and many (prefill).

Decode: a step's contexts are cut into items of one length, whatever row they belong to, so that one long row beside
many short ones still fills the GPU (Flash-Decoding, Dao et al. 2023; the cut by items as in FlashInfer, Ye et al. 2025,
section 3.3). The last item of a row to finish adds up what the row's items left, in order: no result depends on who
was last. Prefill: FlashAttention-2 (Dao 2023) over ragged spans whose prefix is in the pages, the query heads that
share a key head packed into one tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace.ops.triton.rotate import HeadShape
from headrace.ops.triton.runtime import INTERPRETED, launch_options, num_processors, power_of_two

POSITIONS = 64  # keys that a program takes at a time
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Scores:
    """What a layer does to its scores; `window` counts the query itself, 0: none."""

    scale: float
    soft_cap: float | None = None
    window: int = 0
    sinks: torch.Tensor | None = None  # float32 [heads]


@triton.jit
def _plan_items(seq_lens, query_lens, num_rows, capacity, target, window, item_start, chunk_out, WIDTH: tl.constexpr,
                STEP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    row = tl.arange(0, WIDTH)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    count = tl.load(num_rows)
    length = tl.load(seq_lens + row, mask=row < count, other=0)
    if window > 0:
        seen = window + tl.load(query_lens + row, mask=row < count, other=0) - 1 + STEP
        length = tl.minimum(length, seen)
    total = tl.sum(length, axis=0)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(total, target), STEP) * STEP, STEP)
    items = tl.cdiv(length, chunk)
    tl.store(item_start + 1 + row, tl.cumsum(items, axis=0), mask=row < capacity)
    tl.store(item_start, 0)
    tl.store(chunk_out, chunk)


@triton.jit
def _decode(
    q, key_pages, value_pages, out, block_tables, rows, query_start, seq_lens, num_rows, item_start, chunk_in,
    part_out, part_norm, arrived, sinks, table_stride, scale, cap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
    CAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    item, head = tl.program_id(0), tl.program_id(1)
    shared: tl.constexpr = HEADS // KV_HEADS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    count = tl.load(num_rows)
    every = tl.arange(0, ROWS)
    ends = tl.load(item_start + 1 + every, mask=every < count, other=2147483647)
    span = tl.sum((ends <= item).to(tl.int32), axis=0)
    if span < count:
        first_item = tl.load(item_start + span)
        num_items = tl.load(item_start + span + 1) - first_item
        chunk = tl.load(chunk_in)
        length = tl.load(seq_lens + span)
        start = tl.load(query_start + span)
        num_queries = tl.load(query_start + span + 1) - start
        table = block_tables + tl.load(rows + span).to(tl.int64) * table_stride
        lane = tl.arange(0, TILE)
        query, mate = lane // shared, lane % shared
        known = query < num_queries
        q_head = head * shared + mate
        index = tl.arange(0, WIDTH)
        place = (start + query).to(tl.int64)[:, None] * (HEADS * DIM) + q_head[:, None] * DIM + index[None, :]
        mask = known[:, None] & (index < DIM)[None, :]
        tile = tl.load(q + place, mask=mask, other=0.0)
        position = length - num_queries + query
        begin = 0
        if WINDOW:
            begin = tl.maximum(length - num_queries - window + 1, 0) // STEP * STEP
        first = begin + (item - first_item) * chunk
        last = tl.minimum(first + chunk, length)
        best = tl.full((TILE,), float("-inf"), tl.float32)
        norm = tl.zeros((TILE,), tl.float32)
        sums = tl.zeros((TILE, WIDTH), tl.float32)
        for at in tl.range(first, last, STEP):
            key = at + tl.arange(0, STEP)
            real = key < last
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
            higher = tl.maximum(best, tl.max(score, axis=1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(score - safe[:, None])
            fade = tl.exp2(best - safe)
            norm = norm * fade + tl.sum(weight, axis=1)
            sums = sums * fade[:, None] + tl.dot(weight.to(values.dtype), values, input_precision="ieee")
            best = higher
        if SINKS:
            sink = tl.load(sinks + q_head, mask=known, other=0.0) * 1.4426950408889634
        if num_items == 1:
            if SINKS:
                safe = tl.where(best == float("-inf"), 0.0, best)
                norm += tl.exp2(sink - safe)
            result = sums / tl.where(norm == 0.0, 1.0, norm)[:, None]
            tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)
        else:
            home = (item.to(tl.int64) * KV_HEADS + head) * TILE
            tl.store(part_out + (home + lane)[:, None] * WIDTH + index[None, :], sums)
            tl.store(part_norm + (home + lane) * 2, best)
            tl.store(part_norm + (home + lane) * 2 + 1, norm)
            tl.debug_barrier()
            order = tl.atomic_add(arrived + span * KV_HEADS + head, 1, sem="acq_rel")
            tl.debug_barrier()
            if order == num_items - 1:
                tl.store(arrived + span * KV_HEADS + head, 0)
                best = tl.full((TILE,), float("-inf"), tl.float32)
                for one in tl.range(0, num_items):
                    there = ((first_item + one).to(tl.int64) * KV_HEADS + head) * TILE + lane
                    best = tl.maximum(best, tl.load(part_norm + there * 2, cache_modifier=".cg"))
                safe = tl.where(best == float("-inf"), 0.0, best)
                norm = tl.zeros((TILE,), tl.float32)
                sums = tl.zeros((TILE, WIDTH), tl.float32)
                for one in tl.range(0, num_items):
                    there = ((first_item + one).to(tl.int64) * KV_HEADS + head) * TILE + lane
                    fade = tl.exp2(tl.load(part_norm + there * 2, cache_modifier=".cg") - safe)
                    norm += fade * tl.load(part_norm + there * 2 + 1, cache_modifier=".cg")
                    part = tl.load(part_out + there[:, None] * WIDTH + index[None, :], cache_modifier=".cg")
                    sums += fade[:, None] * part
                if SINKS:
                    norm += tl.exp2(sink - safe)
                result = sums / tl.where(norm == 0.0, 1.0, norm)[:, None]
                tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
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
        higher = tl.maximum(best, tl.max(score, axis=1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(best - higher)
        norm = norm * fade + tl.sum(weight, axis=1)
        sums = sums * fade[:, None]
        sums = tl.dot(weight.to(values.dtype), values, sums, input_precision="ieee")
        best = higher
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
        higher = tl.maximum(best, tl.max(score, axis=1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - safe[:, None])
        fade = tl.exp2(best - safe)
        norm = norm * fade + tl.sum(weight, axis=1)
        sums = sums * fade[:, None]
        sums = tl.dot(weight.to(values.dtype), values, sums, input_precision="ieee")
        best = higher
    if SINKS:
        sink = tl.load(sinks + q_head, mask=known, other=0.0) * 1.4426950408889634
        safe = tl.where(best == float("-inf"), 0.0, best)
        norm += tl.exp2(sink - safe)
    result = sums / tl.where(norm == 0.0, 1.0, norm)[:, None]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


def target_items(shape: HeadShape) -> int:
    """Items that a step is cut into, beside one a row: so many that every processor has a few programs."""
    return 8 if INTERPRETED else max(1, 4 * num_processors() // shape.num_kv_heads)


@dataclass(frozen=True)
class DecodeSpace:
    """Memory of split decode attention for up to `max_rows` rows, shared by all layers."""

    item_start: torch.Tensor  # int32 [max_rows + 1]
    chunk: torch.Tensor  # int32 [1]
    outputs: torch.Tensor  # float32 [max items * kv heads * TILE * WIDTH]
    norms: torch.Tensor  # float32 [max items * kv heads * TILE * 2]
    arrived: torch.Tensor  # int32 [max_rows * kv heads], zero between launches

    @classmethod
    def create(cls, max_rows: int, shape: HeadShape, device: torch.device, max_queries: int = 1) -> DecodeSpace:
        tile = power_of_two(max_queries * shape.num_heads // shape.num_kv_heads, 16)
        homes = (max_rows + target_items(shape)) * shape.num_kv_heads * tile
        width = power_of_two(shape.head_dim, 16)
        return cls(
            torch.zeros(max_rows + 1, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.empty(homes * width, dtype=torch.float32, device=device),
            torch.empty(homes * 2, dtype=torch.float32, device=device),
            torch.zeros(max_rows * shape.num_kv_heads, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class PagedRows:
    """The rows of a launch, as the GPU knows them."""

    block_tables: torch.Tensor  # int32 [max rows, max blocks] of one layer group
    rows: torch.Tensor  # int32 [R]
    query_start: torch.Tensor  # int32 [R + 1]
    seq_lens: torch.Tensor  # int32 [R]
    num_rows: torch.Tensor  # int32 [1]  those that are not padding


def plan_items(paged: PagedRows, query_lens: torch.Tensor, shape: HeadShape, window: int, space: DecodeSpace) -> None:
    """Cut the contexts of `paged` into items; once a step and layer group. query_lens int32 [R]."""
    count = paged.rows.shape[0]
    _plan_items[(1,)](
        paged.seq_lens, query_lens, paged.num_rows, count, target_items(shape), window, space.item_start, space.chunk,
        WIDTH=power_of_two(count, 16), STEP=POSITIONS, **launch_options(num_warps=4),
    )  # fmt: skip


def decode_attention(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    paged: PagedRows,
    shape: HeadShape,
    scores: Scores,
    space: DecodeSpace,
    num_queries: int,
    out: torch.Tensor,
) -> None:
    """Attention of up to `num_queries` queries a row: q and out [T, heads * D]; `space` as `plan_items` left it."""
    key_pages, value_pages = cache
    count = paged.rows.shape[0]
    grid = (count + target_items(shape), shape.num_kv_heads)
    _decode[grid](
        q, key_pages, value_pages, out, paged.block_tables, paged.rows, paged.query_start, paged.seq_lens,
        paged.num_rows, space.item_start, space.chunk, space.outputs, space.norms, space.arrived,
        q if scores.sinks is None else scores.sinks, paged.block_tables.stride(0), scores.scale,
        scores.soft_cap or 1.0, scores.window,
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, DIM=shape.head_dim,
        WIDTH=power_of_two(shape.head_dim, 16), PAGE=key_pages.shape[2], QUERIES=num_queries,
        TILE=power_of_two(num_queries * shape.num_heads // shape.num_kv_heads, 16), STEP=POSITIONS,
        ROWS=power_of_two(count, 16), CAP=scores.soft_cap is not None, WINDOW=scores.window > 0,
        SINKS=scores.sinks is not None, **launch_options(num_warps=4, num_stages=3),
    )  # fmt: skip


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
    """Attention of spans of any length: q and out [T, heads * D]. `tiles`: the span of each tile and the first of its
    queries in the span, int32 [tiles]; a tile has `prefill_tile(shape)` queries."""
    key_pages, value_pages = cache
    _prefill[(tiles[0].shape[0], shape.num_kv_heads)](
        q, key_pages, value_pages, out, paged.block_tables, paged.rows, paged.query_start, paged.seq_lens, *tiles,
        q if scores.sinks is None else scores.sinks, paged.block_tables.stride(0), scores.scale,
        scores.soft_cap or 1.0, scores.window,
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, DIM=shape.head_dim,
        WIDTH=power_of_two(shape.head_dim, 16), PAGE=key_pages.shape[2], TILE=_prefill_rows(shape), STEP=POSITIONS,
        STAGES=2, CAP=scores.soft_cap is not None, WINDOW=scores.window > 0, SINKS=scores.sinks is not None,
        **launch_options(num_warps=8 if shape.head_dim >= 64 else 4, num_stages=2),
    )  # fmt: skip
