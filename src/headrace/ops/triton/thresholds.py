"""The smallest value that top_k, top_p and min_p leave, without a sort: digit by digit, by counting.

Values v = (logit - best) / temperature are at most 0, and the bits of -v, read as an integer, order them. The threshold
is found four bits a pass, from the highest on: a pass counts, for each of the 16 values that its digit may have, how
many tokens (top_k) or how much probability (top_p) lies at or above it. Programs share the vocabulary; each begins by
adding up what all left in the pass before, so a pass is one launch and nothing waits inside it. Sums are made in a
fixed order: the same threshold every time. As in sampling/stages.py, tokens as likely as the last one kept are kept.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from headrace.ops.triton.runtime import Kernel, kernel, launch_options, power_of_two

_PASSES = 8  # of four bits: bits of float32 without the sign
_CHUNK = 4096  # tokens of a program
TOP_K, TOP_P = 0, 1


@triton.jit
def _digit(partial, states, wanted, line, num_lines, num_chunks, step, CHUNKS: tl.constexpr):
    """The digits found up to pass `step`: adds up what that pass's programs left."""
    chunk, value = tl.arange(0, CHUNKS)[:, None], tl.arange(0, 16)
    place = ((step % 2) * num_lines + line) * num_chunks * 16
    parts = tl.load(partial + place + chunk * 16 + value[None, :], mask=chunk < num_chunks, other=0.0)
    reached = tl.sum(parts, axis=0)
    goal = tl.load(wanted + line)
    prefix = tl.load(states + (step % 2) * num_lines + line)
    digit = tl.minimum(tl.sum((reached < goal).to(tl.int32), axis=0), 15)
    return prefix + (digit << (28 - 4 * step))


@triton.jit
def _asked(temperature, limit, vocab, KIND: tl.constexpr):
    """Whether a row asks for this kind of threshold."""
    if KIND == 0:
        return (temperature > 0.0) & (limit > 0) & (limit < vocab)
    return (temperature > 0.0) & (limit.to(tl.float32, bitcast=True) < 1.0)


@partial(Kernel, do_not_specialize=("step",))
def _count(
    logits, bounds, cuts, partial, states, wanted, vocab, num_lines, num_chunks, step, table, rows, spans,
    RECORD: tl.constexpr, TEMPERATURE: tl.constexpr, LIMIT: tl.constexpr, KIND: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    line, piece = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    record = table + tl.load(rows + tl.load(spans + line)).to(tl.int64) * RECORD
    temperature = tl.load(record + TEMPERATURE).to(tl.float32, bitcast=True)
    limit = tl.load(record + LIMIT)
    if _asked(temperature, limit, vocab, KIND):
        prefix = 0
        if step > 0:
            prefix = _digit(partial, states, wanted, line, num_lines, num_chunks, step - 1, CHUNKS)
        if piece == 0:
            tl.store(states + (step % 2) * num_lines + line, prefix)
        best = tl.load(bounds + line)
        cut = tl.load(cuts + line)
        source = logits + line.to(tl.int64) * vocab
        digit = tl.arange(0, 16)
        # the last key that a digit lets in; 15 of the first pass lets everything in
        last = prefix + (digit << (28 - 4 * step)) + ((1 << (28 - 4 * step)) - 1)
        last = tl.where((step == 0) & (digit >= 8), 2147483647, last)
        sums = tl.zeros((16,), tl.float64)  # a block's in float32, blocks in float64
        for at in tl.range(piece * CHUNK, tl.minimum((piece + 1) * CHUNK, vocab), BLOCK):
            token = at + tl.arange(0, BLOCK)
            inside = token < vocab
            value = (tl.load(source + token, mask=inside, other=float("-inf")) - best) / temperature
            key = tl.abs(value).to(tl.int32, bitcast=True)
            below = (key[:, None] <= last[None, :]) & inside[:, None]
            if KIND == 0:
                sums += tl.sum(below.to(tl.int32), axis=0).to(tl.float64)
            else:
                mass = tl.where(value >= cut, tl.exp(value), 0.0)
                sums += tl.sum(tl.where(below, mass[:, None], 0.0), axis=0).to(tl.float64)
        place = (((step % 2) * num_lines + line) * num_chunks + piece) * 16
        tl.store(partial + place + digit, sums)


@kernel
def _aim(
    partial, wanted, num_lines, num_chunks, table, rows, spans,
    RECORD: tl.constexpr, LIMIT: tl.constexpr, KIND: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What the threshold has to reach: top_k tokens, or top_p of all that is left, known after the first pass."""
    line = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    limit = tl.load(table + tl.load(rows + tl.load(spans + line)).to(tl.int64) * RECORD + LIMIT)
    if KIND == 0:
        tl.store(wanted + line, limit.to(tl.float64))
    else:
        chunk = tl.arange(0, CHUNKS)
        parts = tl.load(partial + (line * num_chunks + chunk) * 16 + 15, mask=chunk < num_chunks, other=0.0)
        tl.store(wanted + line, tl.sum(parts, axis=0) * limit.to(tl.float32, bitcast=True).to(tl.float64))


@kernel
def _settle(
    cuts, partial, states, wanted, vocab, num_lines, num_chunks, table, rows, spans,
    RECORD: tl.constexpr, TEMPERATURE: tl.constexpr, LIMIT: tl.constexpr, MIN_P: tl.constexpr, KIND: tl.constexpr,
    CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    record = table + tl.load(rows + tl.load(spans + line)).to(tl.int64) * RECORD
    temperature = tl.load(record + TEMPERATURE).to(tl.float32, bitcast=True)
    limit = tl.load(record + LIMIT)
    cut = tl.load(cuts + line)
    if _asked(temperature, limit, vocab, KIND):
        prefix = _digit(partial, states, wanted, line, num_lines, num_chunks, 7, CHUNKS)
        cut = -tl.cast(prefix, tl.float32, bitcast=True)
    if KIND == 1:
        min_p = tl.load(record + MIN_P).to(tl.float32, bitcast=True)
        if (temperature > 0.0) & (min_p > 0.0):
            cut = tl.maximum(cut, tl.log(min_p))
    tl.store(cuts + line, cut)


def find_thresholds(
    logits: torch.Tensor,
    bounds: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    spans: torch.Tensor,
    record: int,
    temperature: int,
    limits: tuple[int, int, int],
) -> torch.Tensor:
    """float32 [L]: the smallest v that each line of logits [L, V] keeps, -inf for all. `bounds` [L] is the best logit
    of each; rows of the table's `record` words hold the temperature and the `limits` top_k, top_p, min_p there."""
    lines, vocab = logits.shape
    chunks = triton.cdiv(vocab, _CHUNK)
    width = power_of_two(chunks)
    device = logits.device
    cuts = torch.full((lines,), float("-inf"), device=device)
    partial = torch.empty((2, lines, chunks, 16), dtype=torch.float64, device=device)
    states = torch.empty((2, lines), dtype=torch.int32, device=device)
    wanted = torch.empty(lines, dtype=torch.float64, device=device)
    row = (table, rows, spans)
    for kind in (TOP_K, TOP_P):
        places = {"RECORD": record, "LIMIT": limits[kind], "KIND": kind, "CHUNKS": width}
        for step in range(_PASSES):
            _count[(lines, chunks)](
                logits, bounds, cuts, partial, states, wanted, vocab, lines, chunks, step, *row, **places,
                TEMPERATURE=temperature, CHUNK=_CHUNK, BLOCK=512, **launch_options(num_warps=4),
            )  # fmt: skip
            if step == 0:
                _aim[(lines,)](partial, wanted, lines, chunks, *row, **places, **launch_options(num_warps=1))
        _settle[(lines,)](
            cuts, partial, states, wanted, vocab, lines, chunks, *row, **places, TEMPERATURE=temperature,
            MIN_P=limits[2], **launch_options(num_warps=1),
        )  # fmt: skip
    return cuts
