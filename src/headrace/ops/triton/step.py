"""The request table on the GPU: patches from the host, the inputs of a step, and what a step leaves behind.

The table is one int32 array, so that whatever the host has to say in a step is a list of segments to be copied into it
(`Patches`), in one transfer and one launch:

    | record of each row: RECORD words | tokens of each row | block table of group 0 | of group 1 | ...
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import torch
import triton
import triton.language as tl

from headrace.ops.triton.runtime import kernel, launch_options, power_of_two
from headrace.ops.triton.thresholds import find_thresholds

# words of a row's record; temperature, top_p and min_p are float32 bits, seed and choice are 64-bit in two words. SHIFT
# is what a token's position is beyond its place in the row's tokens, for rows that hold the end of a sequence only.
KNOWN, COMPUTED, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, CHOICE, SHIFT = 0, 1, 2, 3, 4, 5, 6, 8, 10
RECORD = 16


@kernel
def _patch(table, words, segments, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    segment = segments + tl.program_id(0) * 4
    low, high = tl.load(segment), tl.load(segment + 1)
    target = (high.to(tl.int64) << 31) + low
    source, length = tl.load(segment + 2), tl.load(segment + 3)
    for at in tl.range(0, length, BLOCK):
        index = at + tl.arange(0, BLOCK)
        mask = index < length
        tl.store(table + target + index, tl.load(words + source + index, mask=mask), mask=mask)


def patch(table: torch.Tensor, words: torch.Tensor, segments: torch.Tensor) -> None:
    """Copy pieces of `words` int32 into `table` int32. segments int32 [S, 4]: target (low 31 bits, the rest), source,
    length; they must not overlap."""
    if segments.shape[0]:
        _patch[(segments.shape[0],)](table, words, segments, BLOCK=256, **launch_options(num_warps=2))


@kernel
def _build(
    table, rows, query_start, num_rows, tokens_at, blocks_at, tokens_stride, blocks_stride, group_stride, num_groups,
    token_ids, positions, seq_lens, slots, slots_stride,
    RECORD: tl.constexpr, COMPUTED: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    start = tl.load(query_start + span)
    length = tl.load(query_start + span + 1) - start
    row = tl.load(rows + span).to(tl.int64)
    real = span < tl.load(num_rows)
    computed = tl.load(table + row * RECORD + COMPUTED)
    if tl.program_id(1) == 0:
        tl.store(seq_lens + span, tl.where(real, computed + length, 0))
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < length
    position = tl.where(real, computed + index, 0)
    token = tl.load(table + tokens_at + row * tokens_stride + position, mask=mask & real, other=0)
    tl.store(token_ids + start + index, token, mask=mask)
    tl.store(positions + start + index, position, mask=mask)
    for group in tl.range(0, num_groups):
        place = blocks_at + group * group_stride + row * blocks_stride
        block = tl.load(table + place + position // PAGE, mask=mask & real, other=0)
        slot = tl.where(real, block * PAGE + position % PAGE, -1)
        tl.store(slots + group * slots_stride + start + index, slot, mask=mask)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 of uint32 counters and keys (ops/noise.py): four words."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@kernel
def _chunk_best(
    logits, values, tokens, vocab, chunk, num_chunks, table, rows, spans, line_of, shift, bounds, thresholds,
    RECORD: tl.constexpr, TEMPERATURE: tl.constexpr, SEED: tl.constexpr, CHOICE: tl.constexpr, KNOWN: tl.constexpr,
    SHIFT: tl.constexpr, WARM: tl.constexpr, DRAFTS: tl.constexpr, TREES: tl.constexpr, KEEP: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    line, piece = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = logits + line.to(tl.int64) * vocab
    temperature = 0.0
    if WARM:
        row = tl.load(rows + tl.load(spans + line)).to(tl.int64)
        record = table + row * RECORD
        temperature = tl.load(record + TEMPERATURE).to(tl.float32, bitcast=True)
        position = tl.load(record + KNOWN) + tl.load(record + SHIFT)
        if DRAFTS:
            position += line - tl.load(line_of + tl.load(spans + line))
        if TREES:
            position += tl.load(shift + line)
    top = float("-inf")
    winner = 2147483647
    damaged = 0
    if (not WARM) or temperature > 0.0:
        for at in tl.range(piece * chunk, tl.minimum((piece + 1) * chunk, vocab), BLOCK):
            token = at + tl.arange(0, BLOCK)
            mask = token < tl.minimum((piece + 1) * chunk, vocab)
            value = tl.load(source + token, mask=mask, other=float("-inf"))
            damaged = tl.maximum(damaged, tl.max(((value != value) | (value == float("inf"))).to(tl.int32), axis=0))
            if WARM:
                best = tl.load(bounds + line)
                value = (value - best) / temperature
                value = tl.where(value >= tl.load(thresholds + line), value, float("-inf"))
                if KEEP == 1:
                    tl.store(source + token, value, mask=mask)
                seed_low = tl.load(record + SEED).to(tl.uint32, bitcast=True)
                seed_high = tl.load(record + SEED + 1).to(tl.uint32, bitcast=True)
                c1 = position.to(tl.uint32) + tl.zeros((BLOCK,), tl.uint32)
                c2 = tl.load(record + CHOICE).to(tl.uint32, bitcast=True) + tl.zeros((BLOCK,), tl.uint32)
                c0 = (token >> 2).to(tl.uint32)
                c3 = tl.zeros((BLOCK,), tl.uint32)
                c0, c1, c2, c3 = philox(c0, c1, c2, c3, seed_low, seed_high)
                lane = token & 3
                bits = tl.where(lane < 2, tl.where(lane == 0, c0, c1), tl.where(lane == 2, c2, c3))
                uniform = (bits >> 9).to(tl.float32) * 1.1920928955078125e-07 + 5.9604644775390625e-08
                value += -tl.log(-tl.log(uniform))
                if KEEP == 2:
                    tl.store(source + token, value, mask=mask)
            here = tl.max(value, axis=0)
            first = tl.min(tl.where(value == here, token, 2147483647), axis=0)
            winner = tl.where(here > top, first, winner)
            top = tl.maximum(here, top)
    if damaged > 0:
        winner = -2
    tl.store(values + line * num_chunks + piece, top)
    tl.store(tokens + line * num_chunks + piece, winner)


@kernel
def _best_of_chunks(values, tokens, bounds, num_chunks, WIDTH: tl.constexpr, PDL: tl.constexpr):
    line = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = tl.arange(0, WIDTH)
    value = tl.load(values + line * num_chunks + index, mask=index < num_chunks, other=float("-inf"))
    tl.store(bounds + line, tl.max(value, axis=0))


@triton.jit
def winner_of(
    line, greedy_values, greedy_tokens, warm_values, warm_tokens, num_chunks, temperature,
    WARM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The token that the pieces of a line of logits chose; -2 where nothing can be drawn. `temperature` points to that
    of the line's row."""
    index = tl.arange(0, WIDTH)
    mask = index < num_chunks
    place = line * num_chunks + index
    value = tl.load(greedy_values + place, mask=mask, other=float("-inf"))
    token = tl.load(greedy_tokens + place, mask=mask, other=2147483647)
    damaged = tl.min(token, axis=0) < 0
    if WARM:  # noqa: SIM102  (a constant of the kernel: what follows it may not exist)
        if tl.load(temperature).to(tl.float32, bitcast=True) > 0.0:
            value = tl.load(warm_values + place, mask=mask, other=float("-inf"))
            token = tl.load(warm_tokens + place, mask=mask, other=2147483647)
    top = tl.max(value, axis=0)
    winner = tl.min(tl.where(value == top, token, 2147483647), axis=0)
    return tl.where(damaged | (top == float("-inf")), -2, winner)


@kernel
def _commit(
    table, rows, query_start, num_rows, line_of, num_drafts, greedy_values, greedy_tokens, warm_values, warm_tokens,
    num_chunks, tokens_at, tokens_stride, limit, drawn, drawn_stride, chance,
    RECORD: tl.constexpr, KNOWN: tl.constexpr, COMPUTED: tl.constexpr, TEMPERATURE: tl.constexpr,
    SEED: tl.constexpr, CHOICE: tl.constexpr, WARM: tl.constexpr, DRAFTS: tl.constexpr, COINS: tl.constexpr,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if span < tl.load(num_rows):
        row = tl.load(rows + span).to(tl.int64)
        record = table + row * RECORD
        length = tl.load(query_start + span + 1) - tl.load(query_start + span)
        line = tl.load(line_of + span)
        drafts = 0
        if DRAFTS:
            drafts = tl.load(num_drafts + span)
        kept = length  # tokens of the span that stand
        if line >= 0:
            known = tl.load(record + KNOWN)
            count = 0
            going = 1  # every draft so far was the token drawn
            for step in tl.range(0, drafts + 1):
                if going > 0:
                    winner = winner_of(
                        line + step, greedy_values, greedy_tokens, warm_values, warm_tokens, num_chunks,
                        record + TEMPERATURE, WARM, WIDTH,
                    )  # fmt: skip
                    there = table + tokens_at + row * tokens_stride + tl.minimum(known + step, limit - 1)
                    agreed = winner == tl.load(there)
                    if COINS:  # see coins (sampling/residual.py)
                        word, _, _, _ = philox(
                            (known - known).to(tl.uint32),
                            (known + step).to(tl.uint32),
                            tl.load(record + CHOICE).to(tl.uint32, bitcast=True),
                            (known - known + 1).to(tl.uint32),
                            tl.load(record + SEED).to(tl.uint32, bitcast=True),
                            tl.load(record + SEED + 1).to(tl.uint32, bitcast=True),
                        )
                        agreed = word.to(tl.int64) < chance
                    # where nothing can be drawn behind an accepted draft the span ends: the next step meets it first
                    if (winner >= 0) | (step == 0):
                        tl.store(there, tl.maximum(winner, 0))
                        tl.store(drawn + span * drawn_stride + step, winner)
                        count += 1
                    going = ((winner >= 0) & agreed).to(tl.int32)
            if DRAFTS:  # noqa: SIM102
                if count <= drafts:
                    tl.store(drawn + span * drawn_stride + count, -1)
            tl.store(record + KNOWN, known + count)
            kept = length - (drafts + 1 - count)
        tl.store(record + COMPUTED, tl.load(record + COMPUTED) + kept)


_CHUNKS = 32  # most pieces that a line of logits is searched in
_LEAST_CHUNK = 1024


@dataclass(frozen=True)
class TableView:
    """Where everything lies in the table's words."""

    words: torch.Tensor  # int32
    max_rows: int
    max_len: int  # tokens of a row
    max_blocks: int  # of a row, in one group
    num_groups: int

    @classmethod
    def create(cls, max_rows: int, max_len: int, block_size: int, num_groups: int, device: torch.device) -> TableView:
        blocks = -(-max_len // block_size)
        size = max_rows * (RECORD + max_len + num_groups * blocks)
        return cls(torch.zeros(size, dtype=torch.int32, device=device), max_rows, max_len, blocks, num_groups)

    @property
    def tokens_at(self) -> int:
        return self.max_rows * RECORD

    def blocks_at(self, group: int) -> int:
        return self.tokens_at + self.max_rows * (self.max_len + group * self.max_blocks)

    def tokens(self) -> torch.Tensor:
        """int32 [max rows, max len]: a view."""
        return self.words[self.tokens_at : self.blocks_at(0)].view(self.max_rows, self.max_len)

    def records(self) -> torch.Tensor:
        """int32 [max rows, RECORD]: a view."""
        return self.words[: self.tokens_at].view(self.max_rows, RECORD)

    def block_table(self, group: int) -> torch.Tensor:
        """int32 [max rows, max blocks]: a view."""
        start = self.blocks_at(group)
        return self.words[start : start + self.max_rows * self.max_blocks].view(self.max_rows, self.max_blocks)


@dataclass(frozen=True)
class StepSpans:
    """The spans of a step. `rows` and `query_start` come from the host, the others are filled by `build_inputs`."""

    rows: torch.Tensor  # int32 [R]
    query_start: torch.Tensor  # int32 [R + 1]
    num_rows: torch.Tensor  # int32 [1]  spans that are not padding
    token_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int32 [T]
    seq_lens: torch.Tensor  # int32 [R]
    slots: torch.Tensor  # int32 [G, T]  -1: padding


def build_inputs(view: TableView, spans: StepSpans, longest: int, block_size: int) -> None:
    """Fill the inputs of a step from the table; `longest`: tokens of the longest span."""
    block = min(256, power_of_two(longest, 16))
    grid = (spans.rows.shape[0], triton.cdiv(longest, block))
    _build[grid](
        view.words, spans.rows, spans.query_start, spans.num_rows, view.tokens_at, view.blocks_at(0), view.max_len,
        view.max_blocks, view.max_rows * view.max_blocks, view.num_groups,
        spans.token_ids, spans.positions, spans.seq_lens, spans.slots, spans.slots.stride(0),
        RECORD=RECORD, COMPUTED=COMPUTED, PAGE=block_size, BLOCK=block, **launch_options(num_warps=1),
    )  # fmt: skip


@dataclass(frozen=True)
class Lines:
    """The lines of logits of a step: which span each belongs to, and the other way round."""

    span_of: torch.Tensor  # int32 [L]
    line_of: torch.Tensor  # int32 [R]  the first line whose token counts; -1: the span yields no token
    num_drafts: torch.Tensor | None = None  # int32 [R]  drafts of each span, judged by its lines; None: nowhere any
    shift: torch.Tensor | None = None  # int32 [L]  of trees: depth less place, as TreeSpans has it; None: chains only


@dataclass(frozen=True)
class Draws:
    """What was drawn from each line of logits, in pieces of the vocabulary: the best of each, and its token."""

    values: torch.Tensor  # float32 [2, L, pieces]  of greedy rows, of rows with a temperature
    tokens: torch.Tensor  # int32 [2, L, pieces]
    warm: bool

    @property
    def num_chunks(self) -> int:
        return self.values.shape[2]

    @property
    def width(self) -> int:
        """A power of two that holds the pieces."""
        return power_of_two(self.num_chunks, 16)


class Keep(IntEnum):
    """What `draw` leaves of the logits of rows with a temperature, in their place; those of others stay."""

    NOTHING = 0  # to be counted upon
    STAGED = 1  # over the temperature, -inf for tokens that top_k, top_p and min_p leave out
    NOISY = 2  # with the noise on top, whose highest was drawn


def draw(
    view: TableView, spans: StepSpans, lines: Lines, logits: torch.Tensor, warm: bool, cut: bool,
    keep: Keep = Keep.NOTHING,
) -> Draws:  # fmt: skip
    """Draw a token from every line of logits float32 [L, V]: what sampling/sampler.py defines.

    `warm`: some row may have a temperature; `cut`: some may have top_k, top_p or min_p.
    """
    count, vocab = logits.shape
    device = logits.device
    chunk = max(_LEAST_CHUNK, power_of_two(-(-vocab // _CHUNKS)))
    num_chunks = -(-vocab // chunk)
    values = torch.empty((2, max(count, 1), num_chunks), dtype=torch.float32, device=device)
    tokens = torch.empty((2, max(count, 1), num_chunks), dtype=torch.int32, device=device)
    draws = Draws(values, tokens, warm)
    if not count:
        return draws
    bounds = thresholds = values
    places = {"RECORD": RECORD, "TEMPERATURE": TEMPERATURE}
    noise = {"SEED": SEED, "CHOICE": CHOICE, "KNOWN": KNOWN, "SHIFT": SHIFT, "DRAFTS": lines.num_drafts is not None}
    noise |= {"TREES": lines.shift is not None, "KEEP": int(keep)}
    grid = (count, num_chunks)
    shift = lines.span_of if lines.shift is None else lines.shift
    common = (vocab, chunk, num_chunks, view.words, spans.rows, lines.span_of, lines.line_of, shift)
    _chunk_best[grid](
        logits, values[0], tokens[0], *common, bounds, thresholds, **places, **noise, WARM=False, BLOCK=1024,
        **launch_options(num_warps=4),
    )  # fmt: skip
    if warm:
        bounds = torch.empty(count, dtype=torch.float32, device=device)
        _best_of_chunks[(count,)](
            values[0], tokens[0], bounds, num_chunks, WIDTH=draws.width, **launch_options(num_warps=1)
        )
        if cut:
            limits = (TOP_K, TOP_P, MIN_P)
            thresholds = find_thresholds(
                logits, bounds, view.words, spans.rows, lines.span_of, RECORD, TEMPERATURE, limits
            )
        else:
            thresholds = torch.full((count,), float("-inf"), device=device)
        _chunk_best[grid](
            logits, values[1], tokens[1], *common, bounds, thresholds, **places, **noise, WARM=True, BLOCK=1024,
            **launch_options(num_warps=4),
        )  # fmt: skip
    return draws


def draw_and_commit(
    view: TableView, spans: StepSpans, lines: Lines, logits: torch.Tensor, warm: bool, cut: bool, drawn: torch.Tensor,
    keep: Keep = Keep.NOTHING, acceptance: float | None = None,
) -> None:  # fmt: skip
    """`draw` a token from every line of logits, write it into the table, and every span's progress.

    `drawn` int32 [R] gets the tokens; -2 where the logits are not finite.

    With drafts, which lie in the table behind a row's known tokens, a span of d drafts has 1 + d lines from its
    `line_of` on. Its tokens are those drawn, up to the first that is not the draft there; the row's progress is set
    back by the drafts that were refused. `drawn` is int32 [R, 1 + most drafts] then, and -1 follows a span's last token
    where it has fewer than 1 + d. With `acceptance` a draft is accepted with that probability, whatever it is (see
    SyntheticSampler): 1 draws at every position.
    """
    draws, drafts = draw(view, spans, lines, logits, warm, cut, keep), lines.num_drafts is not None
    # a coin is (word + 1/2) / 2^32 of a word of 32 bits
    chance = 0 if acceptance is None else math.ceil(acceptance * 2.0**32 - 0.5)
    _commit[(spans.rows.shape[0],)](
        view.words, spans.rows, spans.query_start, spans.num_rows, lines.line_of,
        lines.line_of if lines.num_drafts is None else lines.num_drafts, draws.values[0], draws.tokens[0],
        draws.values[1], draws.tokens[1], draws.num_chunks, view.tokens_at, view.max_len, view.max_len, drawn,
        drawn.stride(0), chance, RECORD=RECORD, KNOWN=KNOWN, COMPUTED=COMPUTED, TEMPERATURE=TEMPERATURE, SEED=SEED,
        CHOICE=CHOICE, WARM=warm, DRAFTS=drafts, COINS=acceptance is not None, WIDTH=draws.width,
        **launch_options(num_warps=1),
    )  # fmt: skip
