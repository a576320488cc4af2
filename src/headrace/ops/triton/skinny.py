"""Products of few tokens with a large weight, which are bound by reading the weight.

Weight rows lie on the long side of the matrix unit, tokens on the short one. With `split` > 1 the inner dimension is
cut, so that more processors read; each part writes its own sums, which the op that takes the result adds up in order:
nothing is added by atomics, so the bits do not depend on who finishes first.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl

from headrace.ops.triton.pointwise import gated
from headrace.ops.triton.runtime import INTERPRETED, kernel, launch_options, num_processors, power_of_two
from headrace.ops.triton.tile_table import MAX_TOKENS, WIDE_TOKENS, Product, Tile, measured_tiles

LINE: tl.constexpr = tl.constexpr(64)  # elements of two bytes in a line of the cache


@triton.jit
def _into_cache(pointers):
    """Ask for the lines at `pointers`; nobody waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@kernel
def _linear(
    weight, x, bias, out, num_tokens, rows, inner, x_token, out_part, out_token,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, INNER: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    EVEN_ROWS: tl.constexpr, EVEN_INNER: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    step = tl.arange(0, INNER)
    span = tl.cdiv(tl.cdiv(inner, SPLIT), INNER) * INNER
    first = part * span
    last = tl.minimum(first + span, inner)
    weights = weight + row[:, None].to(tl.int64) * inner + (first + step)[None, :]
    inputs = x + token[None, :] * x_token + (first + step)[:, None]
    known = token[None, :] < num_tokens
    inside = row[:, None] < rows
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if EVEN_ROWS and EVEN_INNER:  # the first tile of weights, which no kernel writes, while the one before ends
            lines = (tl.arange(0, (INNER + LINE - 1) // LINE) * LINE)[None, :]
            _into_cache(weight + row[:, None].to(tl.int64) * inner + first + lines)
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in tl.range(first, last, INNER, num_stages=STAGES):
        if EVEN_ROWS and EVEN_INNER:
            a = tl.load(weights, eviction_policy="evict_first")
            b = tl.load(inputs, mask=known, other=0.0)
        else:
            left = start + step < last
            a = tl.load(weights, mask=inside & left[None, :], other=0.0, eviction_policy="evict_first")
            b = tl.load(inputs, mask=known & left[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
        weights += INNER
        inputs += INNER
    if BIAS:
        added = tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
        sums += tl.where(part == 0, added, 0.0)[:, None]
    target = out + part.to(tl.int64) * out_part + token[None, :].to(tl.int64) * out_token + row[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=known & inside)


@kernel
def _gated_linear(
    weight, x, bias, out, num_tokens, rows, inner, x_token, out_token,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr,
    EVEN_ROWS: tl.constexpr, EVEN_INNER: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    step = tl.arange(0, INNER)
    gate_weights = weight + row[:, None].to(tl.int64) * inner + step[None, :]
    up_weights = gate_weights + rows.to(tl.int64) * inner
    inputs = x + token[None, :] * x_token + step[:, None]
    known = token[None, :] < num_tokens
    inside = row[:, None] < rows
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if EVEN_ROWS and EVEN_INNER:  # as in _linear
            lines = (tl.arange(0, (INNER + LINE - 1) // LINE) * LINE)[None, :]
            _into_cache(weight + row[:, None].to(tl.int64) * inner + lines)
            _into_cache(weight + (row[:, None] + rows).to(tl.int64) * inner + lines)
        tl.extra.cuda.gdc_wait()
    gate = tl.zeros((ROWS, TOKENS), tl.float32)
    up = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in tl.range(0, inner, INNER, num_stages=STAGES):
        if EVEN_ROWS and EVEN_INNER:
            b = tl.load(inputs, mask=known, other=0.0)
            gate = tl.dot(tl.load(gate_weights, eviction_policy="evict_first"), b, gate, input_precision="ieee")
            up = tl.dot(tl.load(up_weights, eviction_policy="evict_first"), b, up, input_precision="ieee")
        else:
            left = start + step < inner
            mask = inside & left[None, :]
            b = tl.load(inputs, mask=known & left[:, None], other=0.0)
            gate = tl.dot(tl.load(gate_weights, mask=mask, other=0.0), b, gate, input_precision="ieee")
            up = tl.dot(tl.load(up_weights, mask=mask, other=0.0), b, up, input_precision="ieee")
        gate_weights += INNER
        up_weights += INNER
        inputs += INNER
    if BIAS:
        gate += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + rows + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    result = gated(gate, up, KIND)
    tl.store(out + token[None, :] * out_token + row[:, None], result.to(out.dtype.element_ty), mask=known & inside)


def _inner_step(inner: int, widest: int) -> int:
    """The widest step up to `widest` that divides `inner`; `widest`, masked, if none does."""
    step = widest
    while step >= 32:
        if inner % step == 0:
            return step
        step //= 2
    return min(widest, power_of_two(inner, 16))


@cache
def choose_tile(tokens: int, rows: int, inner: int, can_split: bool) -> Tile:
    """A tile for so many tokens (a power of two): what was measured for the shape, else by a rule that was fitted to
    measurements on an H200."""
    if INTERPRETED:  # any will do; one that exercises both parts and masks
        return Tile(64, _inner_step(inner, 64), 2 if can_split and inner >= 128 else 1, 1)
    if found := measured_tiles().get(Product("parts" if can_split else "plain", tokens, rows, inner)):
        return found
    if not can_split:
        return replace(_tile(inner, 1), stages=3)
    wanted = 1.36 * num_processors() if tokens <= 16 else 0.68 * num_processors()  # programs
    split = 1
    while split < 4 and triton.cdiv(rows, 64) * split < wanted and inner // (2 * split) >= 384:
        split *= 2
    # with one stage less a program of the next product finds room beside those of this one and is there when they end
    return replace(_tile(inner, split), stages=4) if tokens <= 16 else _tile(inner, split)


@cache
def choose_gated_tile(tokens: int, rows: int, inner: int) -> Tile:
    """As `choose_tile`, for a merged gate and up, whose tiles hold both."""
    if INTERPRETED:
        return Tile(32, _inner_step(inner, 64), 1, 1)
    if found := measured_tiles().get(Product("gated", tokens, rows, inner)):
        return found
    if tokens <= 16 or (tokens <= 32 and rows > 8192):
        return _tile(inner, 1)
    return Tile(64, _inner_step(inner, 64), 1, 6)


@cache
def wide_tile(tokens: int, rows: int, inner: int, kind: str) -> Tile | None:
    """A tile for more than MAX_TOKENS tokens, where one was measured to beat the library's product of that `kind`."""
    if not MAX_TOKENS < tokens <= WIDE_TOKENS:
        return None
    return measured_tiles().get(Product(kind, power_of_two(tokens), rows, inner))


@cache
def invariant_tile(tokens: int, rows: int, inner: int, can_split: bool) -> Tile:
    """A tile that adds up every element in one order, however many tokens there are: the parts of the inner dimension
    are those of a single token, and inside a part the matrix unit goes from the first element to the last."""
    split = choose_tile(16, rows, inner, can_split).split
    step = _inner_step(inner // split, 64)  # one for all: where a part ends depends on it
    if INTERPRETED or tokens <= MAX_TOKENS:
        width = power_of_two(min(tokens, MAX_TOKENS), 16)
        return replace(choose_tile(width, rows, inner, False), inner=step, split=split)
    return Tile(128, step, split, 3, 8, tokens=128)


def _tile(inner: int, split: int) -> Tile:
    step = _inner_step(inner // split, 128)
    return Tile(64, step, split, 5 if step == 128 else 6)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    parts: bool,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias: `dtype` [T, N]; if `parts`, perhaps float32 [split, T, N]
    whose sum over the first axis that is. Made for T <= 64; for more with a tile that suits them."""
    tokens, (rows, inner) = x.shape[0], weight.shape
    tile = tile or choose_tile(power_of_two(min(tokens, MAX_TOKENS), 16), rows, inner, parts)
    width = power_of_two(min(tokens, tile.tokens), 16)
    stages = tile.stages if weight.element_size() <= 2 else 2
    shape = (tokens, rows) if tile.split == 1 else (tile.split, tokens, rows)
    out = torch.empty(shape, dtype=dtype if tile.split == 1 else torch.float32, device=x.device)
    _linear[(triton.cdiv(rows, tile.rows), tile.split, triton.cdiv(tokens, width))](
        weight, x, weight if bias is None else bias, out, tokens, rows, inner,
        x.stride(0), 0 if tile.split == 1 else out.stride(0), rows,
        ROWS=tile.rows, TOKENS=width, INNER=tile.inner, SPLIT=tile.split, STAGES=stages,
        EVEN_ROWS=rows % tile.rows == 0, EVEN_INNER=inner % (tile.inner * tile.split) == 0, BIAS=bias is not None,
        **launch_options(tile.warps, stages),
    )  # fmt: skip
    return out


def skinny_gated(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: int, tile: Tile | None = None
) -> torch.Tensor:
    """activation(gate) * up [T, I] in x's dtype for x [T, K] and weight [2I, K] = gate above up. Made for T <= 64; for
    more with a tile that suits them."""
    tokens, rows, inner = x.shape[0], weight.shape[0] // 2, weight.shape[1]
    tile = tile or choose_gated_tile(power_of_two(tokens, 16), rows, inner)
    width = power_of_two(min(tokens, tile.tokens), 16)
    stages = tile.stages if weight.element_size() <= 2 else 2
    out = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    _gated_linear[(triton.cdiv(rows, tile.rows), triton.cdiv(tokens, width))](
        weight, x, weight if bias is None else bias, out, tokens, rows, inner, x.stride(0), rows,
        ROWS=tile.rows, TOKENS=width, INNER=tile.inner, STAGES=stages, KIND=kind,
        EVEN_ROWS=rows % tile.rows == 0, EVEN_INNER=inner % tile.inner == 0, BIAS=bias is not None,
        **launch_options(tile.warps, stages),
    )  # fmt: skip
    return out
