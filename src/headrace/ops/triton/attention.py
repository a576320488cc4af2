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

_SHARED = 200 << 10  # bytes of shared memory that a program may fill with keys and values
PREFILL_STEP = 64  # keys that a program of prefill takes at a time
DECODE_STEP = 64 if INTERPRETED else 128  # of decode
LEAST = 64 if INTERPRETED else 256  # keys of an item: cutting finer costs more in adding up than it saves


@dataclass(frozen=True)
class Scores:
    """What a layer does to its scores; `window` counts the query itself, 0: none."""

    scale: float
    soft_cap: float | None = None
    window: int = 0
    sinks: torch.Tensor | None = None  # float32 [heads]


# words of an item's record: its span's row, first query, number of queries and keys; the item's first key and one past
# its last; the first item of the span and how many those are, 0 where there is no item
ITEM = 8


@triton.jit
def _plan_items(
    seq_lens, query_start, rows, num_rows, target, least, window, items, counts,
    WIDTH: tl.constexpr, STEP: tl.constexpr, ITEM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    span = tl.arange(0, WIDTH)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mask = span < tl.load(num_rows)
    length = tl.load(seq_lens + span, mask=mask, other=0)
    start = tl.load(query_start + span, mask=mask, other=0)
    queries = tl.load(query_start + span + 1, mask=mask, other=0) - start
    row = tl.load(rows + span, mask=mask, other=0)
    begin = tl.zeros((WIDTH,), tl.int32)
    if window > 0:
        begin = tl.maximum(length - queries - window + 1, 0) // STEP * STEP
    seen = tl.where(mask, length - begin, 0)
    total = tl.sum(seen, axis=0)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(total, target), STEP) * STEP, least)
    number = tl.cdiv(seen, chunk)
    after = tl.cumsum(number, axis=0)
    before = after - number
    most = tl.max(number, axis=0)
    for index in tl.range(0, most):
        first = begin + index * chunk
        real = mask & (index < number)
        record = items + (before + index) * ITEM
        tl.store(record, row, mask=real)
        tl.store(record + 1, start, mask=real)
        tl.store(record + 2, queries, mask=real)
        tl.store(record + 3, length, mask=real)
        tl.store(record + 4, first, mask=real)
        tl.store(record + 5, tl.minimum(first + chunk, length), mask=real)
        tl.store(record + 6, before, mask=real)
        tl.store(record + 7, number, mask=real)
    tl.store(counts, tl.sum(number, axis=0))


@triton.jit
def _decode(
    q, key_pages, value_pages, out, block_tables, items, counts, part_out, part_norm, arrived, sinks,
    table_stride, scale, cap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, ITEM: tl.constexpr,
    CAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    item, head = tl.program_id(0), tl.program_id(1)
    shared: tl.constexpr = HEADS // KV_HEADS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    record = items + item * ITEM
    total = tl.load(counts)
    row = tl.load(record)
    start = tl.load(record + 1)
    num_queries = tl.load(record + 2)
    length = tl.load(record + 3)
    first = tl.load(record + 4)
    last = tl.load(record + 5)
    first_item = tl.load(record + 6)
    num_items = tl.load(record + 7)
    if item < total:
        table = block_tables + row.to(tl.int64) * table_stride
        lane = tl.arange(0, TILE)
        query, mate = lane // shared, lane % shared
        known = query < num_queries
        q_head = head * shared + mate
        index = tl.arange(0, WIDTH)
        place = (start + query).to(tl.int64)[:, None] * (HEADS * DIM) + q_head[:, None] * DIM + index[None, :]
        mask = known[:, None] & (index < DIM)[None, :]
        tile = tl.load(q + place, mask=mask, other=0.0)
        position = length - num_queries + query
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
            order = tl.atomic_add(arrived + first_item * KV_HEADS + head, 1, sem="acq_rel")
            tl.debug_barrier()
            if order == num_items - 1:
                tl.store(arrived + first_item * KV_HEADS + head, 0)
                best = tl.full((TILE,), float("-inf"), tl.float32)
                for one in tl.range(0, num_items, num_stages=4):
                    there = ((first_item + one).to(tl.int64) * KV_HEADS + head) * TILE + lane
                    best = tl.maximum(best, tl.load(part_norm + there * 2, cache_modifier=".cg"))
                safe = tl.where(best == float("-inf"), 0.0, best)
                norm = tl.zeros((TILE,), tl.float32)
                sums = tl.zeros((TILE, WIDTH), tl.float32)
                for one in tl.range(0, num_items, num_stages=4):
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

    items: torch.Tensor  # int32 [max items, ITEM]
    counts: torch.Tensor  # int32 [1]  items there are
    outputs: torch.Tensor  # float32 [max items * kv heads * TILE * WIDTH]
    norms: torch.Tensor  # float32 [max items * kv heads * TILE * 2]
    arrived: torch.Tensor  # int32 [max items * kv heads], zero between launches

    @classmethod
    def create(cls, max_rows: int, shape: HeadShape, device: torch.device, max_queries: int = 1) -> DecodeSpace:
        tile = power_of_two(max_queries * shape.num_heads // shape.num_kv_heads, 16)
        most = max_rows + target_items(shape)
        homes = most * shape.num_kv_heads * tile
        width = power_of_two(shape.head_dim, 16)
        return cls(
            torch.zeros(most * ITEM, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.empty(homes * width, dtype=torch.float32, device=device),
            torch.empty(homes * 2, dtype=torch.float32, device=device),
            torch.zeros(most * shape.num_kv_heads, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class PagedRows:
    """The rows of a launch, as the GPU knows them."""

    block_tables: torch.Tensor  # int32 [max rows, max blocks] of one layer group
    rows: torch.Tensor  # int32 [R]
    query_start: torch.Tensor  # int32 [R + 1]
    seq_lens: torch.Tensor  # int32 [R]
    num_rows: torch.Tensor  # int32 [1]  those that are not padding


def plan_items(paged: PagedRows, shape: HeadShape, window: int, space: DecodeSpace) -> None:
    """Cut the contexts of `paged` into items; once a step and layer group."""
    count = paged.rows.shape[0]
    _plan_items[(1,)](
        paged.seq_lens, paged.query_start, paged.rows, paged.num_rows, target_items(shape), LEAST, window,
        space.items, space.counts,
        WIDTH=power_of_two(count, 16), STEP=DECODE_STEP, ITEM=ITEM, **launch_options(num_warps=4),
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
    width = power_of_two(shape.head_dim, 16)
    # few rows: one program a processor, that keeps much in flight; many: several that take turns
    deep = shape.head_dim == 128 and count <= 64
    step = DECODE_STEP if width * q.element_size() <= 256 else DECODE_STEP // 2
    _decode[grid](
        q, key_pages, value_pages, out, paged.block_tables, space.items, space.counts, space.outputs, space.norms,
        space.arrived, q if scores.sinks is None else scores.sinks, paged.block_tables.stride(0), scores.scale,
        scores.soft_cap or 1.0, scores.window,
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, DIM=shape.head_dim,
        WIDTH=width, PAGE=key_pages.shape[2],
        TILE=power_of_two(num_queries * shape.num_heads // shape.num_kv_heads, 16), STEP=step, ITEM=ITEM,
        CAP=scores.soft_cap is not None, WINDOW=scores.window > 0, SINKS=scores.sinks is not None,
        **launch_options(8 if deep else 4, _stages(3 if deep else 2, step, width, q)),
    )  # fmt: skip


def _stages(wanted: int, step: int, width: int, q: torch.Tensor) -> int:
    """Tiles of keys and values to be in flight: as many as wanted, if shared memory holds them."""
    return max(1, min(wanted, _SHARED // (2 * step * width * q.element_size())))


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
    width = power_of_two(shape.head_dim, 16)
    stages = _stages(2, PREFILL_STEP, 2 * width, q)  # the tile of queries takes as much again
    _prefill[(tiles[0].shape[0], shape.num_kv_heads)](
        q, key_pages, value_pages, out, paged.block_tables, paged.rows, paged.query_start, paged.seq_lens, *tiles,
        q if scores.sinks is None else scores.sinks, paged.block_tables.stride(0), scores.scale,
        scores.soft_cap or 1.0, scores.window,
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, DIM=shape.head_dim,
        WIDTH=width, PAGE=key_pages.shape[2], TILE=_prefill_rows(shape), STEP=PREFILL_STEP,
        STAGES=stages, CAP=scores.soft_cap is not None, WINDOW=scores.window > 0, SINKS=scores.sinks is not None,
        **launch_options(8 if shape.head_dim >= 64 else 4, stages),
    )  # fmt: skip
