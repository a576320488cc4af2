"""Norms of q and k, rotation, and writing keys and values into their pages, in one pass over a merged projection.

Pages are head-major: [num_blocks, kv heads, block size, head dim], so that a program of attention, which works on one
head, reads whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace.ops.triton.paged import HeadShape
from headrace.ops.triton.runtime import RUNTIME, kernel, launch_options, power_of_two


@dataclass(frozen=True)
class HeadNorms:
    """Scales of the norms of each head of q and of k, float32 [D], and their epsilon."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


@kernel
def _rotate_and_write(
    qkv, q_out, k_out, key_pages, value_pages, slots, cos, sin, q_weight, k_weight,
    part_stride, token_stride, half, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    PARTS: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    index = tl.arange(0, WIDTH)[None, :]
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    mask = (head < HEADS + 2 * KV_HEADS) & (index < DIM)
    turned = (index < 2 * half) & (is_q | is_k)
    partner = tl.where(index < half, index + half, tl.where(index < 2 * half, index - half, index))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = qkv + token * token_stride + head * DIM
    value = tl.load(source + index, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(source + partner, mask=mask & turned, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(source + part * part_stride + index, mask=mask, other=0.0).to(tl.float32)
        other += tl.load(source + part * part_stride + partner, mask=mask & turned, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / DIM + eps)[:, None]
        for_q = tl.load(q_weight + index, mask=mask & is_q, other=0.0).to(tl.float32)
        for_k = tl.load(k_weight + index, mask=mask & is_k, other=0.0).to(tl.float32)
        partner_q = tl.load(q_weight + partner, mask=mask & is_q, other=0.0).to(tl.float32)
        partner_k = tl.load(k_weight + partner, mask=mask & is_k, other=0.0).to(tl.float32)
        value = tl.where(is_q | is_k, value * scale * (for_q + for_k), value)
        other = other * scale * (partner_q + partner_k)
    angle = token * half + tl.where(index < half, index, index - half)
    cosine = tl.load(cos + angle, mask=turned, other=1.0)
    sine = tl.load(sin + angle, mask=turned, other=0.0)
    value = value * cosine + tl.where(index < half, -other, other) * sine
    tl.store(q_out + token * HEADS * DIM + head * DIM + index, value.to(q_out.dtype.element_ty), mask=mask & is_q)
    if KEEP:
        k_copy = k_out + token * KV_HEADS * DIM + (head - HEADS) * DIM + index
        tl.store(k_copy, value.to(k_out.dtype.element_ty), mask=mask & is_k)
    slot = tl.load(slots + token).to(tl.int64)
    block, inside = slot // PAGE, slot % PAGE
    kept = mask & (slot >= 0)
    k_place = ((block * KV_HEADS + head - HEADS) * PAGE + inside) * DIM + index
    v_place = ((block * KV_HEADS + head - HEADS - KV_HEADS) * PAGE + inside) * DIM + index
    tl.store(key_pages + k_place, value.to(key_pages.dtype.element_ty), mask=kept & is_k)
    tl.store(value_pages + v_place, value.to(key_pages.dtype.element_ty), mask=kept & (head >= HEADS + KV_HEADS))


def rotate_and_write(
    qkv: torch.Tensor,
    shape: HeadShape,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    out: torch.Tensor,
    norms: HeadNorms | None = None,
    keys: torch.Tensor | None = None,
) -> None:
    """Rotate q of qkv [T, q | k | v] (or [parts, T, ...], summed here) into `out` [T, heads * D] and write keys and
    values into their slots.

    cos, sin float32 [T, R/2]; slots int32 [T], -1 where a token is padding.
    `keys` [T, kv heads * D], if given, gets the rotated keys as well.
    """
    parts = qkv.shape[0] if qkv.ndim == 3 else 1
    tokens = qkv.shape[-2]
    key_pages, value_pages = cache
    if not tokens:
        return
    heads = shape.num_heads + 2 * shape.num_kv_heads
    group = 2 if tokens <= 64 and not RUNTIME.invariant else 8  # norms of heads add up as the group is laid out
    q_weight, k_weight, eps = (cos, cos, 0.0) if norms is None else (norms.q, norms.k, norms.eps)
    _rotate_and_write[(tokens, triton.cdiv(heads, group))](
        qkv, out, out if keys is None else keys, key_pages, value_pages, slots, cos, sin, q_weight, k_weight,
        qkv.stride(0) if parts > 1 else 0, qkv.stride(-2), cos.shape[1], eps,
        HEADS=shape.num_heads, KV_HEADS=shape.num_kv_heads, DIM=shape.head_dim,
        WIDTH=power_of_two(shape.head_dim, 16), PAGE=key_pages.shape[2], PARTS=parts, NORM=norms is not None,
        KEEP=keys is not None, GROUP=group, **launch_options(num_warps=1 if group == 2 else 4),
    )  # fmt: skip
