"""Mixture of experts: routing, and products of tokens grouped by expert.

Tokens are sorted by expert and cut into tiles that belong to one expert each (as MegaBlocks does, Gale et al. 2023,
section 5), on the GPU alone: how many tiles there are is known there only, so programs are started for the most that
there can be, and those without a tile end at once. Every expert that any token chose is read once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace import ops
from headrace.ops.moe import Experts, Routing
from headrace.ops.triton.pointwise import KIND_OF, gated
from headrace.ops.triton.runtime import INTERPRETED, RUNTIME, kernel, launch_options, power_of_two

_LEAST = tl.constexpr(-3.0e38)  # stands for scores that are no numbers: below all others, above experts taken already


@kernel
def _route(
    scores, chosen, weights, scores_token,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr, NORMALISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, WIDTH)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    there = expert < EXPERTS
    score = tl.load(scores + token * scores_token + expert, mask=there, other=0.0).to(tl.float32)
    score = tl.where(score == score, tl.maximum(score, _LEAST), _LEAST)
    score = tl.where(there, score, float("-inf"))
    share = tl.exp(score - tl.max(score, axis=0))
    share = share / tl.sum(share, axis=0)
    taken = expert < 0
    for _ in tl.static_range(TOP):
        best = tl.argmax(tl.where(taken, float("-inf"), score), axis=0)
        taken = taken | (expert == best)
    if NORMALISE:
        share = share / tl.sum(tl.where(taken, share, 0.0), axis=0)
    place = token * TOP + tl.cumsum(taken.to(tl.int32), axis=0) - 1
    tl.store(chosen + place, expert, mask=taken)
    tl.store(weights + place, share, mask=taken)


@triton.jit
def _tile(offsets, number, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr):
    """(expert, first and one past the last of its places) of a tile; expert EXPERTS: there is no such tile."""
    expert = tl.arange(0, WIDTH)
    first = tl.load(offsets + expert, mask=expert < EXPERTS, other=0)
    last = tl.load(offsets + expert + 1, mask=expert < EXPERTS, other=0)
    tiles = tl.cdiv(last - first, TOKENS)
    after = tl.cumsum(tiles, axis=0)
    found = tl.sum(((after <= number) & (expert < EXPERTS)).to(tl.int32), axis=0)
    mine = expert == found
    within = number - tl.sum(tl.where(mine, after - tiles, 0), axis=0)
    start = tl.sum(tl.where(mine, first, 0), axis=0) + within * TOKENS
    end = tl.minimum(start + TOKENS, tl.sum(tl.where(mine, last, 0), axis=0))
    return found, start, end


@kernel
def _expert_gated(
    weight, x, bias, order, offsets, out, rows, inner, x_token, top,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, INNER: tl.constexpr,
    STAGES: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, start, end = _tile(offsets, tl.program_id(1), EXPERTS, WIDTH, TOKENS)
    if expert < EXPERTS:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        place = start + tl.arange(0, TOKENS)
        step = tl.arange(0, INNER)
        known, inside = place < end, row < rows
        token = (tl.load(order + place, mask=known, other=0) // top).to(tl.int64)
        gate_weights = weight + (expert.to(tl.int64) * 2 * rows + row[:, None]) * inner + step[None, :]
        up_weights = gate_weights + rows.to(tl.int64) * inner
        inputs = x + token[None, :] * x_token + step[:, None]
        gate = tl.zeros((ROWS, TOKENS), tl.float32)
        up = tl.zeros((ROWS, TOKENS), tl.float32)
        for at in tl.range(0, inner, INNER, num_stages=STAGES):
            left = at + step < inner
            mask = inside[:, None] & left[None, :]
            b = tl.load(inputs, mask=known[None, :] & left[:, None], other=0.0)
            gate = tl.dot(tl.load(gate_weights, mask=mask, other=0.0), b, gate, input_precision="ieee")
            up = tl.dot(tl.load(up_weights, mask=mask, other=0.0), b, up, input_precision="ieee")
            gate_weights += INNER
            up_weights += INNER
            inputs += INNER
        if BIAS:
            source = bias + expert * 2 * rows + row
            gate += tl.load(source, mask=inside, other=0.0).to(tl.float32)[:, None]
            up += tl.load(source + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
        target = out + place.to(tl.int64)[None, :] * rows + row[:, None]
        result = gated(gate, up, KIND).to(out.dtype.element_ty)
        tl.store(target, result, mask=known[None, :] & inside[:, None])


@kernel
def _expert_down(
    weight, x, bias, order, offsets, shares, out, rows, inner,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, INNER: tl.constexpr,
    STAGES: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, start, end = _tile(offsets, tl.program_id(1), EXPERTS, WIDTH, TOKENS)
    if expert < EXPERTS:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        place = start + tl.arange(0, TOKENS)
        step = tl.arange(0, INNER)
        known, inside = place < end, row < rows
        weights = weight + (expert.to(tl.int64) * rows + row[:, None]) * inner + step[None, :]
        inputs = x + place.to(tl.int64)[None, :] * inner + step[:, None]
        sums = tl.zeros((ROWS, TOKENS), tl.float32)
        for at in tl.range(0, inner, INNER, num_stages=STAGES):
            left = at + step < inner
            a = tl.load(weights, mask=inside[:, None] & left[None, :], other=0.0)
            b = tl.load(inputs, mask=known[None, :] & left[:, None], other=0.0)
            sums = tl.dot(a, b, sums, input_precision="ieee")
            weights += INNER
            inputs += INNER
        if BIAS:
            sums += tl.load(bias + expert * rows + row, mask=inside, other=0.0).to(tl.float32)[:, None]
        pair = tl.load(order + place, mask=known, other=0)
        sums *= tl.load(shares + pair, mask=known, other=0.0)[None, :]
        target = out + pair.to(tl.int64)[None, :] * rows + row[:, None]
        tl.store(target, sums, mask=known[None, :] & inside[:, None])


@kernel
def _combine(answers, out, size, TOP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mask = index < size
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP):
        total += tl.load(answers + (token * TOP + rank) * size + index, mask=mask, other=0.0)
    tl.store(out + token * size + index, total, mask=mask)


@dataclass(frozen=True)
class _Cut:
    """Tiles of the two products: tokens, weight rows, inner elements, pipeline depth, warps."""

    tokens: int
    rows: int
    inner: int
    stages: int
    warps: int


def _cut(pairs: int, num_experts: int, element: int) -> _Cut:
    if INTERPRETED:
        return _Cut(16, 32, 32, 1, 4)
    stages = 4 if element <= 2 else 2
    # what an expert gets on the average decides how many of a tile's places are in use
    mean = pairs / num_experts
    if mean <= 16:
        return _Cut(16, 64, 128 if element <= 2 else 64, stages, 4)
    return _Cut(64, 64, 64, stages, 4) if mean <= 96 else _Cut(128, 64, 64, stages, 8)


def choose(scores: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts int32 [T, k], weights float32 [T, k]) of router scores [T, E], in the order of the experts' numbers."""
    tokens, num_experts = scores.shape
    chosen = torch.empty((tokens, routing.top_k), dtype=torch.int32, device=scores.device)
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=scores.device)
    _route[(tokens,)](
        scores, chosen, weights, scores.stride(0),
        EXPERTS=num_experts, WIDTH=power_of_two(num_experts, 16), TOP=routing.top_k, NORMALISE=routing.normalise,
        **launch_options(1),
    )  # fmt: skip
    return chosen, weights


@ops.moe.variant("triton")
def moe(
    x: torch.Tensor, scores: torch.Tensor, experts: Experts, routing: Routing, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See ops.moe: float32 [T, H]; `experts` holds tensors [E, 2I, H] and [E, H, I]."""
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
    (tokens, hidden), (num_experts, double, _) = x.shape, gate_up.shape
    inner, top = double // 2, routing.top_k
    if out is None:
        out = torch.empty((tokens, hidden), dtype=torch.float32, device=x.device)
    if not tokens:
        return out
    chosen, shares = choose(scores, routing)
    pairs = tokens * top
    sorted_experts, order = torch.sort(chosen.view(-1), stable=True)
    bounds = torch.arange(num_experts + 1, dtype=torch.int32, device=x.device)
    offsets = torch.searchsorted(sorted_experts, bounds, out_int32=True)
    order = order.to(torch.int32)
    cut = _cut(pairs, num_experts, gate_up.element_size())
    tiles = min(num_experts, pairs) + pairs // cut.tokens
    between = torch.empty((pairs, inner), dtype=RUNTIME.activation, device=x.device)
    answers = torch.empty((pairs, hidden), dtype=torch.float32, device=x.device)
    common = {
        "EXPERTS": num_experts, "WIDTH": power_of_two(num_experts, 16), "ROWS": cut.rows, "TOKENS": cut.tokens,
        "INNER": cut.inner, "STAGES": cut.stages,
    }  # fmt: skip
    options = launch_options(cut.warps, cut.stages)
    gate_up_bias, down_bias = experts.gate_up_bias, experts.down_bias
    _expert_gated[(triton.cdiv(inner, cut.rows), tiles)](
        gate_up, x, x if gate_up_bias is None else gate_up_bias, order, offsets, between, inner, hidden, x.stride(0),
        top, **common, KIND=KIND_OF[experts.activation], BIAS=gate_up_bias is not None, **options,
    )  # fmt: skip
    _expert_down[(triton.cdiv(hidden, cut.rows), tiles)](
        down, between, between if down_bias is None else down_bias, order, offsets, shares, answers, hidden, inner,
        **common, BIAS=down_bias is not None, **options,
    )  # fmt: skip
    block = min(1024, power_of_two(hidden, 16))
    _combine[(tokens, triton.cdiv(hidden, block))](answers, out, hidden, TOP=top, BLOCK=block, **launch_options())
    return out
