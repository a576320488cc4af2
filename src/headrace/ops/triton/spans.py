"""Attention of a few queries a row over head-major pages, with the context split: drafts that are verified.

A step's contexts are cut into items of one length, whatever row they belong to, so that a few long contexts fill the
GPU (Flash-Decoding, Dao et al. 2023; the cut by items as in FlashInfer, Ye et al. 2025, section 3.3). The queries of a
span and the heads that share a key head are the rows of one tile; a query sees what lies before its span and, inside
it, the tokens up to itself or, in a token tree, its ancestors. Items that are parts of a context leave their sums in
memory, and a second kernel adds those up, in order, a token and key head each: with so many rows a tile, one program
that adds up all parts would be what the step waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace.ops.triton.paged import HeadShape, PagedRows, Scores
from headrace.ops.triton.runtime import INTERPRETED, kernel, launch_options, num_processors, power_of_two
from headrace.ops.triton.softmax import MERGED, merged_parts, softmax_step

MOST_QUERIES = 64  # of a span: as many as a mask of ancestors has bits
WAVES = 2  # programs for each processor that contexts are cut into: a tile has many rows, and so has each part
STEP = 64 if INTERPRETED else 128  # keys that items are multiples of
LEAST = 64 if INTERPRETED else 256  # keys of an item: cutting finer costs more in adding up than it saves

# words of an item's record: its span's row, token and number of keys; the item's first key and one past its last; the
# first item of the span and how many those are; the queries of the span; where the item's part of the result lies
ITEM = 9
SPAN = 4  # words of a span's record: its token, its queries, where its first part lies, how many it has (0: one item)


@kernel
def _plan_items(
    seq_lens, query_start, rows, num_rows, target, least, window, items, counts, spans, most_rows, most_queries,
    WIDTH: tl.constexpr, STEP: tl.constexpr, ITEM: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    span = tl.arange(0, WIDTH)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mask = span < tl.load(num_rows)
    length = tl.load(seq_lens + span, mask=mask, other=0)
    start = tl.load(query_start + span, mask=mask, other=0)
    queries = tl.load(query_start + span + 1, mask=mask, other=0) - start
    mask = mask & (queries <= most_queries)  # longer ones are not this kernel's
    row = tl.load(rows + span, mask=mask, other=0)
    begin = tl.zeros((WIDTH,), tl.int32)
    if window > 0:  # the first query sees the lowest key
        begin = tl.maximum(length - queries + 1 - window, 0) // STEP * STEP
    seen = tl.where(mask, length - begin, 0)
    total = tl.sum(seen, axis=0)
    chunk = tl.cdiv(total, target)
    chunk = tl.maximum(tl.cdiv(chunk, STEP) * STEP, least)
    number = tl.cdiv(seen, chunk)
    after = tl.cumsum(number, axis=0)
    before = after - number
    parts = tl.where(number > 1, number, 0)
    place = tl.cumsum(parts, axis=0) - parts
    most = tl.max(number, axis=0)
    for index in tl.range(0, most):
        first = begin + index * chunk
        real = mask & (index < number)
        record = items + (before + index) * ITEM
        tl.store(record, row, mask=real)
        tl.store(record + 1, start, mask=real)
        tl.store(record + 2, length, mask=real)
        tl.store(record + 3, first, mask=real)
        tl.store(record + 4, tl.minimum(first + chunk, length), mask=real)
        tl.store(record + 5, before, mask=real)
        tl.store(record + 6, number, mask=real)
        tl.store(record + 7, queries, mask=real)
        tl.store(record + 8, place + index, mask=real)
    kept = span < most_rows
    tl.store(spans + span * SPAN, start, mask=kept)
    tl.store(spans + span * SPAN + 1, queries, mask=kept)
    tl.store(spans + span * SPAN + 2, place, mask=kept)
    tl.store(spans + span * SPAN + 3, parts, mask=kept)
    tl.store(counts, tl.sum(number, axis=0))


@kernel
def _spans(
    q, key_pages, value_pages, out, block_tables, items, counts, part_out, part_norm, sinks, ancestors, positions,
    table_stride, scale, cap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, ITEM: tl.constexpr, STAGES: tl.constexpr,
    TREE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    item, head = tl.program_id(0), tl.program_id(1)
    shared: tl.constexpr = HEADS // KV_HEADS
    first_query = tl.program_id(2) * (TILE // shared)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if item >= tl.load(counts):
        return
    record = items + item * ITEM
    queries = tl.load(record + 7)
    if first_query >= queries:
        return
    row = tl.load(record)
    start = tl.load(record + 1).to(tl.int64)
    length = tl.load(record + 2)
    first = tl.load(record + 3)
    last = tl.load(record + 4)
    table = block_tables + row.to(tl.int64) * table_stride
    lane = tl.arange(0, TILE)
    query, mate = first_query + lane // shared, lane % shared
    known = (query < queries) & (lane < TILE // shared * shared)
    q_head = head * shared + mate
    index = tl.arange(0, WIDTH)[None, :]
    inside = known[:, None] & (index < DIM)
    place = (start + query)[:, None] * (HEADS * DIM) + q_head[:, None] * DIM + index
    tile = tl.load(q + place, mask=inside, other=0.0)
    root = length - queries  # keys below it are seen by every query
    position = root + query
    if TREE:
        allowed = tl.load(ancestors + start + query, mask=known, other=0)
        position = tl.load(positions + start + query, mask=known, other=0)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    norm = tl.zeros((TILE,), tl.float32)
    sums = tl.zeros((TILE, WIDTH), tl.float32)
    plain = first
    if not WINDOW:
        plain = first + tl.maximum(tl.minimum(last, root) - first, 0) // STEP * STEP
    for at in tl.range(first, plain, STEP, num_stages=STAGES):
        key = at + tl.arange(0, STEP)
        block = tl.load(table + key // PAGE).to(tl.int64)
        source = ((block * KV_HEADS + head) * PAGE + key % PAGE) * DIM
        take = (index < DIM) & (key >= 0)[:, None]
        keys = tl.load(key_pages + source[:, None] + index, mask=take, other=0.0)
        values = tl.load(value_pages + source[:, None] + index, mask=take, other=0.0)
        score = tl.dot(tile, tl.trans(keys), input_precision="ieee") * scale
        if CAP:
            score = cap * (2.0 / (1.0 + tl.exp(-2.0 * score / cap)) - 1.0)
        score = score * 1.4426950408889634
        best, norm, sums = softmax_step(score, values, best, norm, sums, False)
    for at in tl.range(plain, last, STEP):
        key = at + tl.arange(0, STEP)
        real = key < last
        block = tl.load(table + key // PAGE, mask=real, other=0).to(tl.int64)
        source = ((block * KV_HEADS + head) * PAGE + key % PAGE) * DIM
        take = real[:, None] & (index < DIM)
        keys = tl.load(key_pages + source[:, None] + index, mask=take, other=0.0)
        values = tl.load(value_pages + source[:, None] + index, mask=take, other=0.0)
        score = tl.dot(tile, tl.trans(keys), input_precision="ieee") * scale
        if CAP:
            score = cap * (2.0 / (1.0 + tl.exp(-2.0 * score / cap)) - 1.0)
        if TREE:
            node = tl.maximum(key - root, 0)
            above = ((allowed[:, None] >> tl.minimum(node, 63)[None, :].to(tl.int64)) & 1) != 0
            seen = real[None, :] & ((key < root)[None, :] | above)
            key_position = tl.load(positions + start + node, mask=real & (key >= root), other=0)
            key_position = tl.where(key < root, key, key_position)
        else:
            seen = real[None, :] & (key[None, :] <= position[:, None])
            key_position = key
        if WINDOW:
            seen = seen & (key_position[None, :] > position[:, None] - window)
        score = tl.where(seen, score * 1.4426950408889634, float("-inf"))
        best, norm, sums = softmax_step(score, values, best, norm, sums, True)
    if tl.load(record + 6) == 1:
        if SINKS:
            sink = tl.load(sinks + q_head, mask=known, other=0.0) * 1.4426950408889634
            norm += tl.exp2(sink - tl.where(best == float("-inf"), 0.0, best))
        result = sums / tl.where(norm == 0.0, 1.0, norm)[:, None]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
    else:
        home = (tl.load(record + 8).to(tl.int64) * KV_HEADS + head) * ROWS + first_query * shared + lane
        tl.store(part_out + home[:, None] * WIDTH + index, sums, mask=known[:, None])
        tl.store(part_norm + home * 2, best, mask=known)
        tl.store(part_norm + home * 2 + 1, norm, mask=known)


@kernel
def _merge(
    part_out, part_norm, spans, sinks, out,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    MATES: tl.constexpr, MERGE: tl.constexpr, SPAN: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    span, query, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    shared: tl.constexpr = HEADS // KV_HEADS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    record = spans + span * SPAN
    num_parts = tl.load(record + 3)
    if (num_parts == 0) | (query >= tl.load(record + 1)):
        return
    token = (tl.load(record) + query).to(tl.int64)
    index = tl.arange(0, WIDTH)[None, :]
    base = (tl.load(record + 2).to(tl.int64) * KV_HEADS + head) * ROWS + query * shared
    result = merged_parts(
        part_out, part_norm, sinks, base, KV_HEADS * ROWS, num_parts, head, index,
        shared, WIDTH, MATES, MERGE, SINKS,
    )  # fmt: skip
    few = tl.arange(0, MATES)
    real = few < shared
    place = out + token * (HEADS * DIM) + (head * shared + few)[:, None] * DIM + index
    tl.store(place, result.to(out.dtype.element_ty), mask=real[:, None] & (index < DIM))


@dataclass(frozen=True)
class SpanSpace:
    """Memory of split attention for up to `max_rows` spans of up to `most` tokens, shared by all layers of a group."""

    items: torch.Tensor  # int32 [max items, ITEM]
    counts: torch.Tensor  # int32 [1]  items there are
    spans: torch.Tensor  # int32 [max rows, SPAN]
    outputs: torch.Tensor  # float32 [max parts, kv heads, most * shared heads, WIDTH]
    norms: torch.Tensor  # float32 [max parts, kv heads, most * shared heads, 2]  highest score, sum of weights
    most: int

    @classmethod
    def create(cls, max_rows: int, most: int, shape: HeadShape, device: torch.device) -> SpanSpace:
        """ValueError: spans of so many tokens have no room in a mask of ancestors."""
        if not 1 <= most <= MOST_QUERIES:
            raise ValueError(f"spans of {most} tokens; give 1 to {MOST_QUERIES}")
        kv_heads, width = shape.num_kv_heads, power_of_two(shape.head_dim, 16)
        queries = most * (shape.num_heads // kv_heads)
        items = max_rows + target_items(shape)
        # a context of several items has fewer than twice the items that its share of all keys stands for
        parts = min(items, 2 * target_items(shape))
        return cls(
            torch.zeros((items, ITEM), dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros((max_rows, SPAN), dtype=torch.int32, device=device),
            torch.empty((parts, kv_heads, queries, width), dtype=torch.float32, device=device),
            torch.empty((parts, kv_heads, queries, 2), dtype=torch.float32, device=device),
            most,
        )


def target_items(shape: HeadShape) -> int:
    """Items that a step is cut into at most, beside one a span."""
    return 8 if INTERPRETED else max(2, WAVES * num_processors() // shape.num_kv_heads)


def plan_spans(paged: PagedRows, shape: HeadShape, window: int, space: SpanSpace) -> None:
    """Cut the contexts of `paged` into items; once a step and layer group. Spans of more than `space.most` tokens are
    left out."""
    _plan_items[(1,)](
        paged.seq_lens, paged.query_start, paged.rows, paged.num_rows, target_items(shape), LEAST, window,
        space.items, space.counts, space.spans, space.spans.shape[0], space.most,
        WIDTH=power_of_two(paged.rows.shape[0], 16), STEP=STEP, ITEM=ITEM, SPAN=SPAN, **launch_options(num_warps=4),
    )  # fmt: skip


def span_tile(shape: HeadShape, most: int) -> int:
    """Rows of a tile of `span_attention`: queries of a span of up to `most` tokens, times the heads that share a key
    head; a span with more has several tiles."""
    shared = shape.num_heads // shape.num_kv_heads
    return max(power_of_two(shared, 16), min(power_of_two(most * shared, 16), 128 if shape.head_dim <= 128 else 64))


def _pipeline(tile: int, width: int, key_bytes: int) -> tuple[int, int, int]:
    """(keys at a time, warps, pipeline stages): the block numbers of keys come a stage before them, so 2n + 1 stages
    hold n tiles of keys and values."""
    step = STEP if INTERPRETED or width * key_bytes <= 128 else STEP // 2
    tiles = max(1, min(3, (160 << 10) // (2 * step * width * key_bytes)))
    return step, 8 if tile * width > 4096 else 4, 2 * tiles + 1


def span_attention(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    paged: PagedRows,
    shape: HeadShape,
    scores: Scores,
    space: SpanSpace,
    out: torch.Tensor,
    tree: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Attention of spans of up to `space.most` tokens whose keys and values are in their pages: q and out [T, heads *
    D]; `space` as `plan_spans` left it.

    `tree`, where spans are token trees: (int64 [T], int32 [T]): bit i of a token's mask is set where it sees token i of
    its span, itself included (of a chain: the lowest bits up to its own); and each token's position, which in a tree
    is that of the span's first token plus its depth (the mask as in SpecInfer, Miao et al. 2024, section 4.2).
    """
    key_pages, value_pages = cache
    shared = shape.num_heads // shape.num_kv_heads
    width, tile, count = power_of_two(shape.head_dim, 16), span_tile(shape, space.most), paged.rows.shape[0]
    step, warps, stages = _pipeline(tile, width, key_pages.element_size())
    rows, sinks = space.outputs.shape[2], q if scores.sinks is None else scores.sinks
    _spans[(count + target_items(shape), shape.num_kv_heads, triton.cdiv(space.most, tile // shared))](
        q, key_pages, value_pages, out, paged.block_tables, space.items, space.counts, space.outputs, space.norms,
        sinks, *(tree or (paged.rows, paged.rows)), paged.block_tables.stride(0), scores.scale,
        scores.soft_cap or 1.0, scores.window,
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, DIM=shape.head_dim, WIDTH=width, PAGE=key_pages.shape[2],
        TILE=tile, ROWS=rows, STEP=step, ITEM=ITEM, STAGES=stages, TREE=tree is not None,
        CAP=scores.soft_cap is not None, WINDOW=scores.window > 0, SINKS=scores.sinks is not None,
        **launch_options(warps, stages),
    )  # fmt: skip
    mates = power_of_two(shared)
    _merge[(count, space.most, shape.num_kv_heads)](
        space.outputs, space.norms, space.spans, sinks, out,
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, DIM=shape.head_dim, WIDTH=width, ROWS=rows, MATES=mates,
        MERGE=max(1, MERGED // (mates * width)), SPAN=SPAN, SINKS=scores.sinks is not None, **launch_options(4),
    )  # fmt: skip
