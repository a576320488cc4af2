"""Embedding, gated activations, sums and products of elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace import ops
from headrace.ops.triton.runtime import RUNTIME, kernel, launch_options, power_of_two

_BLOCK = 1024
SILU, GELU_TANH, GELU, SWIGLU_CLAMPED = 0, 1, 2, 3
KIND_OF = {"silu": SILU, "gelu_tanh": GELU_TANH, "gelu": GELU, "swiglu_clamped": SWIGLU_CLAMPED}


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """activation(gate) * up of float32 values: 0 SiLU, 1 GELU in its tanh form, 2 GELU, 3 GPT-OSS's clamped SwiGLU."""
    if KIND == 0:
        return gate / (1.0 + tl.exp(-gate)) * up
    if KIND == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        tanh = 2.0 / (1.0 + tl.exp(-2.0 * inner)) - 1.0
        return 0.5 * gate * (1.0 + tanh) * up
    if KIND == 3:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up


@kernel
def _gated_mul(x, out, x_token, inner, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < inner
    gate = tl.load(x + token * x_token + index, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + token * x_token + inner + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * inner + index, gated(gate, up, KIND).to(out.dtype.element_ty), mask=mask)


@kernel
def _embedding(ids, weight, out, size, factor, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    row = tl.load(ids + token).to(tl.int64)
    value = tl.load(weight + row * size + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * size + index, value * factor, mask=mask)


def embedding_rows(ids: torch.Tensor, weight: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """float32 [T, H]: rows `ids` [T] of weight [V, H], times `factor`."""
    size = weight.shape[1]
    out = torch.empty((ids.shape[0], size), dtype=torch.float32, device=weight.device)
    if ids.shape[0]:
        block = min(_BLOCK, power_of_two(size, 16))
        grid = (ids.shape[0], triton.cdiv(size, block))
        _embedding[grid](ids, weight, out, size, factor, BLOCK=block, **launch_options())
    return out


@ops.embedding.variant("triton")
def embedding(ids: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ops.embedding; always float32, as the residual stream is."""
    rows = embedding_rows(ids, weight)
    return rows if out is None else out.copy_(rows)


def _launch_gated(x: torch.Tensor, out: torch.Tensor | None, kind: int) -> torch.Tensor:
    inner = x.shape[1] // 2
    if out is None:
        out = torch.empty((x.shape[0], inner), dtype=RUNTIME.activation, device=x.device)
    if x.shape[0]:
        block = min(_BLOCK, power_of_two(inner, 16))
        grid = (x.shape[0], triton.cdiv(inner, block))
        _gated_mul[grid](x, out, x.stride(0), inner, KIND=kind, BLOCK=block, **launch_options())
    return out


@ops.silu_mul.variant("triton")
def silu_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ops.silu_mul."""
    return _launch_gated(x, out, SILU)


@ops.gelu_tanh_mul.variant("triton")
def gelu_tanh_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ops.gelu_tanh_mul."""
    return _launch_gated(x, out, GELU_TANH)


@ops.gelu_mul.variant("triton")
def gelu_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ops.gelu_mul."""
    return _launch_gated(x, out, GELU)


@ops.swiglu_clamped_mul.variant("triton")
def swiglu_clamped_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ops.swiglu_clamped_mul."""
    return _launch_gated(x, out, SWIGLU_CLAMPED)


KINDS = {ops.ACTIVATIONS[name].name: kind for name, kind in KIND_OF.items()}
