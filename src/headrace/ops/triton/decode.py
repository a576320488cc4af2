"""Attention of one query a row over head-major pages, from the projection on: norms of heads, rotation, writing the new
key and value, and attending with the context split.

The contexts of a step, one behind the other, are cut into slots of one length, as many as there are programs for a key
head at a time, wherever rows begin and end: a program reads as much as any other, one long row beside many short ones
or not (Flash-Decoding, Dao et al. 2023; the even cut over all rows as in Stream-K, Osama et al. 2023). What it reads is
listed before, once a step, so that the keys of its next row are on their way while it finishes a row. The last program
of a row to finish adds up what the row's programs left, in order: no result depends on who was last. The new key and
value never go through memory for the query that they came with, so nobody waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import torch
import triton
import triton.language as tl

from headrace.ops.triton.paged import HeadShape, PagedRows, Scores
from headrace.ops.triton.rotate import HeadNorms
from headrace.ops.triton.runtime import INTERPRETED, RUNTIME, kernel, launch_options, num_processors, power_of_two
from headrace.ops.triton.softmax import MERGED, merged_parts

LEAST = 64 if INTERPRETED else 256  # keys of a slot: cutting finer costs more in adding up than it saves
# with RUNTIME.invariant a row is cut by its own length alone: slots of so many keys, of a long row so many slots
INVARIANT_LEAST, INVARIANT_SPLITS = (64, 4) if INTERPRETED else (2048, 16)

FEW_ROWS = 16  # rows up to which programs of wide heads have a processor to themselves
_LISTERS = 8  # programs a row that list what is to be read

# What a row has in a slot is an item. Words of an item's record: its row, token and number of keys; its steps; the keys
# of its first step that the window hides; the first of the row's parts of the result and how many there are; its own
# part; whether it is the row's last
ITEM = 9
SLOT = 3  # words of a slot's record: its first step and one past its last, its first item
SPAN = 3  # words of a row's record: its first step, its steps, its first key


@kernel
def _plan_slots(
    seq_lens, query_start, rows, num_rows, number_of_slots, least, window, items, slots, spans, counts,
    WIDTH: tl.constexpr, STEP: tl.constexpr, ITEM: tl.constexpr, SLOT: tl.constexpr, SPAN: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    span = tl.arange(0, WIDTH)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mask = span < tl.load(num_rows)
    length = tl.load(seq_lens + span, mask=mask, other=0)
    start = tl.load(query_start + span, mask=mask, other=0)
    row = tl.load(rows + span, mask=mask, other=0)
    lowest = tl.zeros((WIDTH,), tl.int32)
    if window > 0:
        lowest = tl.maximum(length - window, 0)
    begin = lowest // STEP * STEP
    steps = tl.where(mask, tl.cdiv(length - begin, STEP), 0)
    end = tl.cumsum(steps, axis=0)
    first = end - steps
    total = tl.sum(steps, axis=0)
    if SPLITS > 0:  # every row is cut as it would be alone
        size = tl.maximum(tl.cdiv(steps, SPLITS), least)
        number = tl.cdiv(steps, size)
        origin = first  # where the row's slots are counted from
    else:
        size = tl.zeros((WIDTH,), tl.int32) + tl.maximum(tl.cdiv(total, number_of_slots), least)
        number = tl.where(steps > 0, (end - 1) // size - first // size + 1, 0)
        origin = first // size * size
    before = tl.cumsum(number, axis=0) - number
    parts = tl.where(number > 1, number, 0)
    place = tl.cumsum(parts, axis=0) - parts
    if SPLITS > 0:
        first_slot = before
        used = tl.sum(number, axis=0)
    else:
        first_slot = origin // size
        used = tl.cdiv(total, tl.max(size, axis=0))
    tl.store(counts, used)
    tl.store(spans + span * SPAN, first, mask=mask)
    tl.store(spans + span * SPAN + 1, steps, mask=mask)
    tl.store(spans + span * SPAN + 2, begin, mask=mask)
    most = tl.max(number, axis=0)
    for index in tl.range(0, most):
        real = mask & (index < number)
        slot_begin = origin + index * size
        slot_end = tl.minimum(slot_begin + size, end if SPLITS > 0 else total)
        item_begin = tl.maximum(first, slot_begin)
        item_end = tl.minimum(end, slot_end)
        record = items + (before + index) * ITEM
        tl.store(record, row, mask=real)
        tl.store(record + 1, start, mask=real)
        tl.store(record + 2, length, mask=real)
        tl.store(record + 3, item_end - item_begin, mask=real)
        tl.store(record + 4, tl.where(index == 0, lowest - begin, 0), mask=real)
        tl.store(record + 5, place, mask=real)
        tl.store(record + 6, number, mask=real)
        tl.store(record + 7, place + index, mask=real)
        tl.store(record + 8, (index == number - 1).to(tl.int32), mask=real)
        opens = real & (item_begin == slot_begin)  # the item is the slot's first
        record = slots + (first_slot + index) * SLOT
        tl.store(record, slot_begin, mask=opens)
        tl.store(record + 1, slot_end, mask=opens)
        tl.store(record + 2, before + index, mask=opens)


@kernel
def _list_units(
    seq_lens, rows, num_rows, block_tables, spans, units, table_stride, written,
    STEP: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if span >= tl.load(num_rows):
        return
    record = spans + span * SPAN
    first, count = tl.load(record).to(tl.int64), tl.load(record + 1) * (STEP // UNIT)
    begin, end = tl.load(record + 2), tl.load(seq_lens + span) - written
    table = block_tables + tl.load(rows + span).to(tl.int64) * table_stride
    for at in tl.range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        index = at + tl.arange(0, BLOCK)
        key = begin + index * UNIT
        known = (index < count) & (key < end)
        block = tl.load(table + key // PAGE, mask=known, other=0)
        valid = tl.where(known, tl.minimum(end - key, UNIT), 0)
        number = block * (PAGE // UNIT) + key % PAGE // UNIT
        tl.store(units + first * (STEP // UNIT) + index, number * (2 * UNIT) + valid, mask=index < count)


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


@triton.jit
def _add_up(
    record, part_out, part_norm, arrived, sinks, out, head, index,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    MATES: tl.constexpr, MERGE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Of an item that is part of a row: if it is the last to arrive, add up the row's parts and write its result."""
    shared: tl.constexpr = HEADS // KV_HEADS
    num_parts = tl.load(record + 6)
    if num_parts > 1:
        first_part = tl.load(record + 5)
        tl.debug_barrier()
        order = tl.atomic_add(arrived + first_part * KV_HEADS + head, 1, sem="acq_rel")
        tl.debug_barrier()
        if order == num_parts - 1:
            tl.store(arrived + first_part * KV_HEADS + head, 0)
            base = (first_part.to(tl.int64) * KV_HEADS + head) * TILE
            result = merged_parts(
                part_out, part_norm, sinks, base, KV_HEADS * TILE, num_parts, head, index,
                shared, WIDTH, MATES, MERGE, SINKS,
            )  # fmt: skip
            few = tl.arange(0, MATES)
            real_head = few < shared
            token = tl.load(record + 1).to(tl.int64)
            target = out + token * (HEADS * DIM) + (head * shared + few)[:, None] * DIM + index
            tl.store(target, result.to(out.dtype.element_ty), mask=real_head[:, None] & (index < DIM))


@kernel
def _decode(
    qkv, cos, sin, q_weight, k_weight, key_pages, value_pages, out, block_tables, items, slots, counts, units,
    part_out, part_norm, arrived, sinks, part_stride, token_stride, table_stride, eps, scale, cap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    HALF: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr, FUSED: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr, UNIT: tl.constexpr, ITEM: tl.constexpr, SLOT: tl.constexpr, MATES: tl.constexpr,
    MERGE: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    slot, head = tl.program_id(0), tl.program_id(1)
    shared: tl.constexpr = HEADS // KV_HEADS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if slot >= tl.load(counts):
        return
    first_step, last_step = tl.load(slots + slot * SLOT), tl.load(slots + slot * SLOT + 1)
    first_item = tl.load(slots + slot * SLOT + 2)
    item = first_item
    lane = tl.arange(0, TILE)
    known = lane < shared
    q_head = head * shared + lane
    index = tl.arange(0, WIDTH)[None, :]
    inside = known[:, None] & (index < DIM)
    offset = tl.arange(0, STEP)
    left = first_item * 0  # steps of the item that are to come
    hidden = left
    token = left.to(tl.int64)
    tile = tl.zeros((TILE, WIDTH), key_pages.dtype.element_ty)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    norm = tl.zeros((TILE,), tl.float32)
    sums = tl.zeros((TILE, WIDTH), tl.float32)
    for step in tl.range(first_step, last_step, num_stages=STAGES):
        unit = tl.load(units + step * (STEP // UNIT) + offset // UNIT)
        real = offset % UNIT < unit % (2 * UNIT)
        number = (unit // (2 * UNIT)).to(tl.int64)
        within = number % (PAGE // UNIT) * UNIT + offset % UNIT
        place = ((number // (PAGE // UNIT) * KV_HEADS + head) * PAGE + within) * DIM
        take = real[:, None] & (index < DIM)
        keys = tl.load(key_pages + place[:, None] + index, mask=take, other=0.0)
        values = tl.load(value_pages + place[:, None] + index, mask=take, other=0.0)
        if left == 0:  # an item begins
            token = tl.load(items + item * ITEM + 1).to(tl.int64)
            left = tl.load(items + item * ITEM + 3)
            hidden = tl.load(items + item * ITEM + 4)
            source = qkv + token * token_stride
            if FUSED:
                angle = token * HALF + tl.where(index < HALF, index, index - HALF)
                cosine = tl.load(cos + angle, mask=index < 2 * HALF, other=1.0)
                sine = tl.load(sin + angle, mask=index < 2 * HALF, other=0.0)
                partner = tl.where(index < HALF, index + HALF, tl.where(index < 2 * HALF, index - HALF, index))
                tile = _rotated(
                    source + q_head[:, None] * DIM, part_stride, q_weight, cosine, sine, index, partner, inside,
                    known[:, None] & (index < 2 * HALF), eps, DIM, PARTS, NORM, HALF,
                ).to(key_pages.dtype.element_ty)  # fmt: skip
            else:
                tile = tl.load(source + q_head[:, None] * DIM + index, mask=inside, other=0.0)
            best = tl.full((TILE,), float("-inf"), tl.float32)
            norm = tl.zeros((TILE,), tl.float32)
            sums = tl.zeros((TILE, WIDTH), tl.float32)
        score = tl.dot(tile, tl.trans(keys), input_precision="ieee") * scale
        if CAP:
            score = cap * (2.0 / (1.0 + tl.exp(-2.0 * score / cap)) - 1.0)
        if WINDOW:
            real = real & (offset >= hidden)
            hidden = hidden * 0
        score = tl.where(real[None, :], score * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(best, tl.max(score, axis=1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - safe[:, None])
        fade = tl.exp2(best - safe)
        norm = norm * fade + tl.sum(weight, axis=1)
        sums = sums * fade[:, None] + tl.dot(weight.to(values.dtype), values, input_precision="ieee")
        best = higher
        left -= 1
        if left == 0:  # the item ends
            record = items + item * ITEM
            if FUSED:  # noqa: SIM102  (a constant of the kernel: what follows it may not exist)
                if tl.load(record + 8) != 0:  # this item has the new key
                    newest = tl.load(record + 2) - 1
                    source = qkv + token * token_stride
                    angle = token * HALF + tl.where(index < HALF, index, index - HALF)
                    cosine = tl.load(cos + angle, mask=index < 2 * HALF, other=1.0)
                    sine = tl.load(sin + angle, mask=index < 2 * HALF, other=0.0)
                    partner = tl.where(index < HALF, index + HALF, tl.where(index < 2 * HALF, index - HALF, index))
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
                    table = block_tables + tl.load(record).to(tl.int64) * table_stride
                    block = tl.load(table + newest // PAGE).to(tl.int64)
                    home_of = ((block * KV_HEADS + head) * PAGE + newest % PAGE) * DIM + index
                    tl.store(key_pages + home_of, new_key, mask=index < DIM)
                    tl.store(value_pages + home_of, new_value, mask=index < DIM)
                    alone = tl.sum(tile.to(tl.float32) * new_key.to(tl.float32), axis=1) * scale
                    if CAP:
                        alone = cap * (2.0 / (1.0 + tl.exp(-2.0 * alone / cap)) - 1.0)
                    alone = alone * 1.4426950408889634
                    higher = tl.maximum(best, alone)
                    fade, weight_of = tl.exp2(best - higher), tl.exp2(alone - higher)
                    norm = norm * fade + weight_of
                    sums = sums * fade[:, None] + weight_of[:, None] * new_value.to(tl.float32)
                    best = higher
            if tl.load(record + 6) == 1:
                whole = norm
                if SINKS:
                    sink = tl.load(sinks + q_head, mask=known, other=0.0) * 1.4426950408889634
                    whole = norm + tl.exp2(sink - tl.where(best == float("-inf"), 0.0, best))
                result = sums / tl.where(whole == 0.0, 1.0, whole)[:, None]
                target = out + token * (HEADS * DIM) + q_head[:, None] * DIM + index
                tl.store(target, result.to(out.dtype.element_ty), mask=inside)
            else:
                home = (tl.load(record + 7).to(tl.int64) * KV_HEADS + head) * TILE
                tl.store(part_out + (home + lane)[:, None] * WIDTH + index, sums, mask=known[:, None])
                tl.store(part_norm + (home + lane) * 2, best, mask=known)
                tl.store(part_norm + (home + lane) * 2 + 1, norm, mask=known)
            item += 1
    for end in tl.static_range(2):  # only the first and the last item of a slot can be parts of a row
        mine = first_item if end == 0 else item - 1
        if (end == 0) | (mine > first_item):
            _add_up(
                items + mine * ITEM, part_out, part_norm, arrived, sinks, out, head, index,
                HEADS, KV_HEADS, DIM, WIDTH, TILE, MATES, MERGE, SINKS,
            )  # fmt: skip


@dataclass(frozen=True)
class DecodeTile:
    """How a program of `_decode` works: keys of a step, warps, pipeline stages, and programs a processor. The numbers
    of blocks come a stage before the keys, so 2n + 1 stages hold n steps of keys and values."""

    step: int
    warps: int
    stages: int
    programs: int


def decode_tile(rows: int, width: int, element_size: int) -> DecodeTile:
    """Few rows: one program a processor, with much in flight; more: two, one of which reads while the other ends."""
    key_bytes = width * element_size
    if INTERPRETED:
        return DecodeTile(64, 4, 1, 1)
    if key_bytes <= 128:
        return DecodeTile(128, 4, 3, 2)
    if key_bytes <= 256:
        return DecodeTile(128, 8, 5, 1) if rows <= FEW_ROWS else DecodeTile(64, 4, 5, 2)
    return DecodeTile(64 if key_bytes <= 512 else 32, 8, 5, 1)


def num_slots(shape: HeadShape, tile: DecodeTile) -> int:
    """Slots of a step: programs that run at a time, for each key head."""
    return 8 if INTERPRETED else max(1, tile.programs * num_processors() // shape.num_kv_heads)


def _max_slots(rows: int, shape: HeadShape, tile: DecodeTile, max_len: int) -> int:
    if RUNTIME.invariant:
        return rows * min(INVARIANT_SPLITS, triton.cdiv(max_len, INVARIANT_LEAST))
    return num_slots(shape, tile)


@dataclass(frozen=True)
class DecodeSpace:
    """Memory of split decode attention for up to `max_rows` rows, shared by all layers of a group."""

    items: torch.Tensor  # int32 [max items, ITEM]
    slots: torch.Tensor  # int32 [max slots, SLOT]
    spans: torch.Tensor  # int32 [max rows, SPAN]
    counts: torch.Tensor  # int32 [1]  slots there are
    units: torch.Tensor  # int32 [max steps * step / unit]  numbers of what a step reads, with the keys that each holds
    outputs: torch.Tensor  # float32 [max parts, kv heads, TILE, WIDTH]
    norms: torch.Tensor  # float32 [max parts, kv heads, TILE, 2]  highest score, sum of weights
    arrived: torch.Tensor  # int32 [max parts, kv heads], zero between launches
    max_len: int  # keys of a row at most
    element_size: int  # bytes of a number in the pages

    @classmethod
    def create(
        cls, max_rows: int, shape: HeadShape, page: int, dtype: torch.dtype, device: torch.device, max_len: int
    ) -> DecodeSpace:
        """For pages of `page` keys of `dtype`, and rows of up to `max_len` keys."""
        width, kv_heads = power_of_two(shape.head_dim, 16), shape.num_kv_heads
        tiles = [decode_tile(rows, width, dtype.itemsize) for rows in (1, max_rows)]
        most = max(_max_slots(max_rows, shape, tile, max_len) for tile in tiles)
        units = max(max_rows * triton.cdiv(max_len, tile.step) * (tile.step // gcd(tile.step, page)) for tile in tiles)
        parts = most if RUNTIME.invariant else 2 * most  # of each slot at most two

        def numbers(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        return cls(
            numbers(max_rows + most, ITEM), numbers(most, SLOT), numbers(max_rows, SPAN), numbers(1), numbers(units),
            torch.empty((parts, kv_heads, _tile(shape), width), dtype=torch.float32, device=device),
            torch.empty((parts, kv_heads, _tile(shape), 2), dtype=torch.float32, device=device),
            numbers(parts, kv_heads), max_len, dtype.itemsize,
        )  # fmt: skip


    def beside(self) -> DecodeSpace:
        """Room for the plan of another launch of as many rows, whose results lie in the same memory: launches that
        follow each other."""
        plan = (self.items, self.slots, self.spans, self.counts, self.units)
        items, slots, spans, counts, units = map(torch.zeros_like, plan)
        return replace(self, items=items, slots=slots, spans=spans, counts=counts, units=units)


def _tile(shape: HeadShape) -> int:
    return power_of_two(shape.num_heads // shape.num_kv_heads, 16)


def _tile_of(rows: int, shape: HeadShape, space: DecodeSpace) -> DecodeTile:
    width = power_of_two(shape.head_dim, 16)
    return decode_tile(1 if RUNTIME.invariant else rows, width, space.element_size)


def plan_decode(paged: PagedRows, shape: HeadShape, window: int, space: DecodeSpace, page: int, fused: bool) -> None:
    """Cut the contexts of `paged`, one token a row, into slots, and list what they read; once a step and layer group.
    `fused`: `decode_attention` will be given a projection, whose keys are in no page yet."""
    count = paged.rows.shape[0]
    tile = _tile_of(count, shape, space)
    least = INVARIANT_LEAST if RUNTIME.invariant else LEAST
    _plan_slots[(1,)](
        paged.seq_lens, paged.query_start, paged.rows, paged.num_rows, num_slots(shape, tile),
        max(1, least // tile.step), window, space.items, space.slots, space.spans, space.counts,
        WIDTH=power_of_two(count, 16), STEP=tile.step, ITEM=ITEM, SLOT=SLOT, SPAN=SPAN,
        SPLITS=INVARIANT_SPLITS if RUNTIME.invariant else 0, **launch_options(num_warps=4),
    )  # fmt: skip
    _list_units[(count, _LISTERS)](
        paged.seq_lens, paged.rows, paged.num_rows, paged.block_tables, space.spans, space.units,
        paged.block_tables.stride(0), int(fused),
        STEP=tile.step, UNIT=gcd(tile.step, page), PAGE=page, SPAN=SPAN, BLOCK=256, **launch_options(num_warps=4),
    )  # fmt: skip


@dataclass(frozen=True)
class Projected:
    """What a layer's projection gave, and how its heads are to be normed and turned."""

    qkv: torch.Tensor  # [T, q | k | v], or [parts, T, q | k | v] that are added up here
    cos: torch.Tensor  # float32 [T, R/2]
    sin: torch.Tensor  # float32 [T, R/2]
    norms: HeadNorms | None = None


def decode_attention(
    given: Projected | torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    paged: PagedRows,
    shape: HeadShape,
    scores: Scores,
    space: DecodeSpace,
    out: torch.Tensor,
) -> None:
    """Attends, for rows of one token: `out` [T, heads * D]; `space` as `plan_decode` left it.

    `given` a projection, writes the new keys and values; given q [T, heads * D], rotated, finds them in their pages.
    """
    fused = isinstance(given, Projected)
    projected = given if isinstance(given, Projected) else Projected(given, space.norms, space.norms)
    qkv, cos, norms = projected.qkv, projected.cos, projected.norms
    key_pages, value_pages = cache
    count, page = paged.rows.shape[0], key_pages.shape[2]
    parts = qkv.shape[0] if qkv.ndim == 3 else 1
    width = power_of_two(shape.head_dim, 16)
    mates = power_of_two(shape.num_heads // shape.num_kv_heads)
    tile = _tile_of(count, shape, space)
    _decode[(_max_slots(count, shape, tile, space.max_len), shape.num_kv_heads)](
        qkv, cos, projected.sin, cos if norms is None else norms.q, cos if norms is None else norms.k,
        key_pages, value_pages, out, paged.block_tables, space.items, space.slots, space.counts, space.units,
        space.outputs, space.norms, space.arrived, cos if scores.sinks is None else scores.sinks,
        qkv.stride(0) if parts > 1 else 0, qkv.stride(-2), paged.block_tables.stride(0),
        0.0 if norms is None else norms.eps, scores.scale, scores.soft_cap or 1.0,
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, DIM=shape.head_dim, WIDTH=width, PAGE=page,
        HALF=cos.shape[1] if fused else 0, PARTS=parts, NORM=norms is not None, FUSED=fused, TILE=_tile(shape),
        STEP=tile.step, UNIT=gcd(tile.step, page), ITEM=ITEM, SLOT=SLOT, MATES=mates,
        MERGE=max(1, MERGED // (mates * width)), STAGES=tile.stages, CAP=scores.soft_cap is not None,
        WINDOW=scores.window > 0, SINKS=scores.sinks is not None, **launch_options(tile.warps, tile.stages),
    )  # fmt: skip
