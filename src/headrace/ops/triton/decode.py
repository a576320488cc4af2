"""Attention of one query a row over head-major pages, from the projection on: norms of heads, rotation, writing the new
key and value, and attending with the context split.

A step's contexts are cut into items of one length, whatever row they belong to, so that one long row beside many short
ones still fills the GPU (Flash-Decoding, Dao et al. 2023; the cut by items as in FlashInfer, Ye et al. 2025, section
3.3). The last item of a row to finish adds up what the row's items left, in order: no result depends on who was last.
The new key and value never go through memory for the query that they came with, so nobody waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl

from headrace.ops.triton.paged import HeadShape, PagedRows, Scores, num_stages
from headrace.ops.triton.rotate import HeadNorms
from headrace.ops.triton.runtime import INTERPRETED, RUNTIME, kernel, launch_options, num_processors, power_of_two

STEP = 64 if INTERPRETED else 128  # keys that a program takes at a time
LEAST = 64 if INTERPRETED else 256  # keys of an item: cutting finer costs more in adding up than it saves
# programs for each processor that a step's contexts are cut into: half as many where items then have up to MOST keys,
# since what is cut has to be added up again
WAVES = 4
MOST = 4096

# words of an item's record: its span's row, token and number of keys; the item's first key and one past its last; the
# first item of the span and how many those are; the queries of the span; where the item's part of the result lies
ITEM = 9
SPAN = 4  # words of a span's record: its token, its queries, where its first part lies, how many it has (0: one item)


@kernel
def _plan_items(
    seq_lens, query_start, rows, num_rows, target, least, window, items, counts, spans, most_rows,
    WIDTH: tl.constexpr, STEP: tl.constexpr, ITEM: tl.constexpr, SPAN: tl.constexpr, MOST: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
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
    if window > 0:  # the first query sees the lowest key
        begin = tl.maximum(length - queries + 1 - window, 0) // STEP * STEP
    seen = tl.where(mask, length - begin, 0)
    total = tl.sum(seen, axis=0)
    if SPLITS > 0:  # every row is cut as it would be alone
        chunk = tl.cdiv(seen, SPLITS)
    else:
        chunk = tl.cdiv(total, target // 2)
        if chunk > MOST:
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


@triton.jit
def _rotated(
    source, part_stride, weight, cosine, sine, index, partner, inside, turned, eps,
    DIM: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Heads at `source` [N, 1], their parts added up, normed and turned: float32 [N, WIDTH]."""
    value = tl.load(source + index, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + partner, mask=turned, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(source + part * part_stride + index, mask=inside, other=0.0).to(tl.float32)
        other += tl.load(source + part * part_stride + partner, mask=turned, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / DIM + eps)[:, None]
        value = value * scale * tl.load(weight + index, mask=inside, other=0.0).to(tl.float32)
        other = other * scale * tl.load(weight + partner, mask=turned, other=0.0).to(tl.float32)
    return value * cosine + tl.where(index < HALF, -other, other) * sine


@kernel
def _decode(
    qkv, cos, sin, q_weight, k_weight, key_pages, value_pages, out, block_tables, items, counts,
    part_out, part_norm, arrived, sinks, part_stride, token_stride, table_stride, eps, scale, cap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    HALF: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr, FUSED: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr, ITEM: tl.constexpr, MATES: tl.constexpr, MERGE: tl.constexpr, CAP: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    item, head = tl.program_id(0), tl.program_id(1)
    shared: tl.constexpr = HEADS // KV_HEADS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    record = items + item * ITEM
    total = tl.load(counts)
    row = tl.load(record)
    token = tl.load(record + 1).to(tl.int64)
    length = tl.load(record + 2)
    first = tl.load(record + 3)
    last = tl.load(record + 4)
    first_item = tl.load(record + 5)
    num_items = tl.load(record + 6)
    if item < total:
        table = block_tables + row.to(tl.int64) * table_stride
        lane = tl.arange(0, TILE)
        known = lane < shared
        q_head = head * shared + lane
        index = tl.arange(0, WIDTH)[None, :]
        inside = known[:, None] & (index < DIM)
        turned = known[:, None] & (index < 2 * HALF)
        partner = tl.where(index < HALF, index + HALF, tl.where(index < 2 * HALF, index - HALF, index))
        source = qkv + token * token_stride
        if FUSED:
            angle = token * HALF + tl.where(index < HALF, index, index - HALF)
            cosine = tl.load(cos + angle, mask=index < 2 * HALF, other=1.0)
            sine = tl.load(sin + angle, mask=index < 2 * HALF, other=0.0)
            tile = _rotated(
                source + q_head[:, None] * DIM, part_stride, q_weight, cosine, sine, index, partner, inside, turned,
                eps, DIM, PARTS, NORM, HALF,
            ).to(key_pages.dtype.element_ty)  # fmt: skip
        else:
            tile = tl.load(source + q_head[:, None] * DIM + index, mask=inside, other=0.0)
        best = tl.full((TILE,), float("-inf"), tl.float32)
        norm = tl.zeros((TILE,), tl.float32)
        sums = tl.zeros((TILE, WIDTH), tl.float32)
        newest = length - 1
        end = tl.minimum(last, newest) if FUSED else last
        for at in tl.range(first, end, STEP):
            key = at + tl.arange(0, STEP)
            real = key < end
            block = tl.load(table + key // PAGE, mask=real, other=0).to(tl.int64)
            place = ((block * KV_HEADS + head) * PAGE + key % PAGE) * DIM
            take = real[:, None] & (index < DIM)
            keys = tl.load(key_pages + place[:, None] + index, mask=take, other=0.0)
            values = tl.load(value_pages + place[:, None] + index, mask=take, other=0.0)
            score = tl.dot(tile, tl.trans(keys), input_precision="ieee") * scale
            if CAP:
                score = cap * (2.0 / (1.0 + tl.exp(-2.0 * score / cap)) - 1.0)
            if WINDOW:
                real = real & (key > newest - window)
            score = tl.where(real[None, :], score * 1.4426950408889634, float("-inf"))
            higher = tl.maximum(best, tl.max(score, axis=1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(score - safe[:, None])
            fade = tl.exp2(best - safe)
            norm = norm * fade + tl.sum(weight, axis=1)
            sums = sums * fade[:, None] + tl.dot(weight.to(values.dtype), values, input_precision="ieee")
            best = higher
        if FUSED:  # noqa: SIM102  (a constant of the kernel: what follows it may not exist)
            if last == length:  # this item has the new key
                own = tl.arange(0, 1)[:, None]  # one head, as a matrix
                new_key = _rotated(
                    source + (HEADS + head + own) * DIM, part_stride, k_weight, cosine, sine, index, partner,
                    (own == 0) & (index < DIM), (own == 0) & (index < 2 * HALF), eps, DIM, PARTS, NORM, HALF,
                ).to(key_pages.dtype.element_ty)  # fmt: skip
                there = source + (HEADS + KV_HEADS + head + own) * DIM + index
                value = tl.load(there, mask=index < DIM, other=0.0).to(tl.float32)
                for part in tl.static_range(1, PARTS):
                    value += tl.load(there + part * part_stride, mask=index < DIM, other=0.0).to(tl.float32)
                new_value = value.to(value_pages.dtype.element_ty)
                block = tl.load(table + newest // PAGE).to(tl.int64)
                place = ((block * KV_HEADS + head) * PAGE + newest % PAGE) * DIM + index
                tl.store(key_pages + place, new_key, mask=index < DIM)
                tl.store(value_pages + place, new_value, mask=index < DIM)
                alone = tl.sum(tile.to(tl.float32) * new_key.to(tl.float32), axis=1) * scale
                if CAP:
                    alone = cap * (2.0 / (1.0 + tl.exp(-2.0 * alone / cap)) - 1.0)
                alone = alone * 1.4426950408889634
                higher = tl.maximum(best, alone)
                fade, weight = tl.exp2(best - higher), tl.exp2(alone - higher)
                norm = norm * fade + weight
                sums = sums * fade[:, None] + weight[:, None] * new_value.to(tl.float32)
                best = higher
        target = out + token * (HEADS * DIM) + q_head[:, None] * DIM + index
        if num_items == 1:
            if SINKS:
                norm += tl.exp2(tl.load(sinks + q_head, mask=known, other=0.0) * 1.4426950408889634 - best)
            result = sums / tl.where(norm == 0.0, 1.0, norm)[:, None]
            tl.store(target, result.to(out.dtype.element_ty), mask=inside)
        else:
            home = (item.to(tl.int64) * KV_HEADS + head) * TILE
            tl.store(part_out + (home + lane)[:, None] * WIDTH + index, sums, mask=known[:, None])
            tl.store(part_norm + (home + lane) * 2, best, mask=known)
            tl.store(part_norm + (home + lane) * 2 + 1, norm, mask=known)
            tl.debug_barrier()
            order = tl.atomic_add(arrived + first_item * KV_HEADS + head, 1, sem="acq_rel")
            tl.debug_barrier()
            if order == num_items - 1:
                tl.store(arrived + first_item * KV_HEADS + head, 0)
                # parts of MERGE items at a time, the heads that are there only: [MERGE * MATES, WIDTH]
                merged = tl.arange(0, MERGE * MATES)
                which, mate = merged // MATES, merged % MATES
                base = (first_item.to(tl.int64) * KV_HEADS + head) * TILE + mate
                few = tl.arange(0, MATES)
                top = tl.full((MATES,), float("-inf"), tl.float32)
                for one in tl.range(0, num_items, MERGE):
                    part = base + (one + which) * (KV_HEADS * TILE)
                    there = (mate < shared) & (one + which < num_items)
                    part_best = tl.load(part_norm + part * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
                    top = tl.maximum(top, tl.max(tl.reshape(part_best, (MERGE, MATES)), axis=0))
                top = tl.where(top == float("-inf"), 0.0, top)
                whole = tl.zeros((MATES,), tl.float32)
                result = tl.zeros((MATES, WIDTH), tl.float32)
                for one in tl.range(0, num_items, MERGE):
                    part = base + (one + which) * (KV_HEADS * TILE)
                    there = (mate < shared) & (one + which < num_items)
                    part_best = tl.load(part_norm + part * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
                    part_sum = tl.load(part_norm + part * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
                    values_of = tl.load(
                        part_out + part[:, None] * WIDTH + index, mask=there[:, None], other=0.0, cache_modifier=".cg"
                    )
                    shrink = tl.exp2(tl.reshape(part_best, (MERGE, MATES)) - top[None, :])
                    whole += tl.sum(shrink * tl.reshape(part_sum, (MERGE, MATES)), axis=0)
                    result += tl.sum(shrink[:, :, None] * tl.reshape(values_of, (MERGE, MATES, WIDTH)), axis=0)
                real_head = few < shared
                if SINKS:
                    whole += tl.exp2(
                        tl.load(sinks + head * shared + few, mask=real_head, other=0.0) * 1.4426950408889634 - top
                    )
                result = result / tl.where(whole == 0.0, 1.0, whole)[:, None]
                place_of = out + token * (HEADS * DIM) + (head * shared + few)[:, None] * DIM + index
                tl.store(place_of, result.to(out.dtype.element_ty), mask=real_head[:, None] & (index < DIM))


# with RUNTIME.invariant a row is cut by its own length alone: items of so many keys, of a long row so many items
INVARIANT_LEAST, INVARIANT_SPLITS = (64, 4) if INTERPRETED else (2048, 16)


def max_items(rows: int, shape: HeadShape, max_len: int) -> int:
    """Items that `rows` rows of up to `max_len` keys are cut into at most."""
    if RUNTIME.invariant:
        return rows * min(INVARIANT_SPLITS, triton.cdiv(max_len, INVARIANT_LEAST))
    return rows + target_items(shape)


def target_items(shape: HeadShape, waves: int | None = None) -> int:
    """Items that a step is cut into at most, beside one a row: so many that every processor has `waves` programs."""
    return 8 if INTERPRETED else max(2, (waves or WAVES) * num_processors() // shape.num_kv_heads)


@dataclass(frozen=True)
class DecodeSpace:
    """Memory of split decode attention for up to `max_rows` rows, shared by all layers of a group."""

    items: torch.Tensor  # int32 [max items, ITEM]
    counts: torch.Tensor  # int32 [1]  items there are
    spans: torch.Tensor  # int32 [max rows, SPAN]
    outputs: torch.Tensor  # float32 [max items, kv heads, TILE, WIDTH]
    norms: torch.Tensor  # float32 [max items, kv heads, TILE, 2]  highest score, sum of weights
    arrived: torch.Tensor  # int32 [max items, kv heads], zero between launches
    max_len: int  # keys of a row at most

    @classmethod
    def create(cls, max_rows: int, shape: HeadShape, device: torch.device, max_len: int = 1 << 20) -> DecodeSpace:
        most, kv_heads = max_items(max_rows, shape, max_len), shape.num_kv_heads
        tile, width = _tile(shape), power_of_two(shape.head_dim, 16)
        return cls(
            torch.zeros((most, ITEM), dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros((max_rows, SPAN), dtype=torch.int32, device=device),
            torch.empty((most, kv_heads, tile, width), dtype=torch.float32, device=device),
            torch.empty((most, kv_heads, tile, 2), dtype=torch.float32, device=device),
            torch.zeros((most, kv_heads), dtype=torch.int32, device=device),
            max_len,
        )


def _tile(shape: HeadShape) -> int:
    return power_of_two(shape.num_heads // shape.num_kv_heads, 16)


class PlanSpace(Protocol):
    """Where a plan's records go."""

    @property
    def items(self) -> torch.Tensor: ...

    @property
    def counts(self) -> torch.Tensor: ...

    @property
    def spans(self) -> torch.Tensor: ...


def plan_items(paged: PagedRows, shape: HeadShape, window: int, space: PlanSpace, waves: int | None = None) -> None:
    """Cut the contexts of `paged`, spans of few tokens, into items; once a step and layer group."""
    _plan_items[(1,)](
        paged.seq_lens, paged.query_start, paged.rows, paged.num_rows, target_items(shape, waves),
        INVARIANT_LEAST if RUNTIME.invariant else LEAST, window,
        space.items, space.counts, space.spans, space.spans.shape[0],
        WIDTH=power_of_two(paged.rows.shape[0], 16), STEP=STEP, ITEM=ITEM, SPAN=SPAN, MOST=MOST,
        SPLITS=INVARIANT_SPLITS if RUNTIME.invariant else 0, **launch_options(num_warps=4),
    )  # fmt: skip


@dataclass(frozen=True)
class Projected:
    """What a layer's projection gave, and how its heads are to be normed and turned."""

    qkv: torch.Tensor  # [T, q | k | v], or [parts, T, q | k | v] that are added up here
    cos: torch.Tensor  # float32 [T, R/2]
    sin: torch.Tensor  # float32 [T, R/2]
    norms: HeadNorms | None = None


MERGED = 8192  # elements that are added up at a time


def decode_tile(rows: int, head_dim: int, key_bytes: int) -> tuple[int, int, int]:
    """(keys at a time, warps, pipeline stages) of a program of `_decode`.

    Few rows: one program a processor, that keeps much in flight; many: several, of which one begins while others read.
    """
    if head_dim <= 64 and key_bytes <= 128:  # two tiles of keys in flight: they wait for their block's number
        return STEP, 4, 5
    deep = head_dim == 128 and rows <= 64
    step = STEP if key_bytes <= (256 if rows <= 64 else 128) else STEP // 2
    return step, 8 if deep else 4, 3 if deep else 2


def decode_attention(
    given: Projected | torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    paged: PagedRows,
    shape: HeadShape,
    scores: Scores,
    space: DecodeSpace,
    out: torch.Tensor,
) -> None:
    """Attends, for rows of one token: `out` [T, heads * D]; `space` as `plan_items` left it.

    `given` a projection, writes the new keys and values; given q [T, heads * D], rotated, finds them in their pages.
    """
    fused = isinstance(given, Projected)
    projected = given if isinstance(given, Projected) else Projected(given, space.norms, space.norms)
    qkv, cos, norms = projected.qkv, projected.cos, projected.norms
    key_pages, value_pages = cache
    count = paged.rows.shape[0]
    parts = qkv.shape[0] if qkv.ndim == 3 else 1
    width = power_of_two(shape.head_dim, 16)
    mates = power_of_two(shape.num_heads // shape.num_kv_heads)
    rows = 1 if RUNTIME.invariant else count
    step, warps, stages = decode_tile(rows, shape.head_dim, width * key_pages.element_size())
    _decode[(max_items(count, shape, space.max_len), shape.num_kv_heads)](
        qkv, cos, projected.sin, cos if norms is None else norms.q, cos if norms is None else norms.k,
        key_pages, value_pages, out, paged.block_tables, space.items, space.counts, space.outputs, space.norms,
        space.arrived, cos if scores.sinks is None else scores.sinks,
        qkv.stride(0) if parts > 1 else 0, qkv.stride(-2), paged.block_tables.stride(0),
        0.0 if norms is None else norms.eps, scores.scale, scores.soft_cap or 1.0, scores.window,
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, DIM=shape.head_dim, WIDTH=width,
        PAGE=key_pages.shape[2], HALF=cos.shape[1] if fused else 0, PARTS=parts, NORM=norms is not None, FUSED=fused,
        TILE=_tile(shape), STEP=step, ITEM=ITEM, MATES=mates, MERGE=max(1, MERGED // (mates * width)),
        CAP=scores.soft_cap is not None, WINDOW=scores.window > 0, SINKS=scores.sinks is not None,
        **launch_options(warps, num_stages(stages, step, width, key_pages)),
    )  # fmt: skip
