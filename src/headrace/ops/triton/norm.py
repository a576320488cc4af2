"""RMSNorm, alone and behind a residual sum whose other part may still be in pieces."""

from __future__ import annotations

import torch
import triton.language as tl

from headrace import ops
from headrace.ops.triton.runtime import RUNTIME, kernel, launch_options, power_of_two


@kernel
def _norm(
    x, weight, residual, out,
    x_part, x_token, x_head, out_token, out_head, num_heads, size, eps,
    PARTS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token, head = (row // num_heads).to(tl.int64), row % num_heads
    index = tl.arange(0, BLOCK)
    mask = index < size
    scale = tl.load(weight + index, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = x + token * x_token + head * x_head + index
    value = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(source + part * x_part, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        place = residual + token * size + index
        value += tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, value, mask=mask)
    square = tl.sum(value * value, axis=0) / size
    result = value * (1.0 / tl.sqrt(square + eps)) * scale
    tl.store(out + token * out_token + head * out_head + index, result.to(out.dtype.element_ty), mask=mask)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    size = weight.shape[0]
    parts = x.shape[0] if x.ndim == 3 and residual is not None else 1
    whole = x[0] if parts > 1 or (x.ndim == 3 and residual is not None) else x
    heads = whole.shape[1] if whole.ndim == 3 else 1
    if out is None:
        out = torch.empty(whole.shape, dtype=RUNTIME.activation, device=x.device)
    if rows := whole.shape[0] * heads:
        block = power_of_two(size, 16)
        _norm[(rows,)](
            x, weight, x if residual is None else residual, out,
            x.stride(0) if parts > 1 else 0, whole.stride(0), whole.stride(1) if whole.ndim == 3 else 0,
            out.stride(0), out.stride(1) if out.ndim == 3 else 0, heads, size, eps,
            PARTS=parts, ADD=residual is not None, BLOCK=block,
            **launch_options(num_warps=4 if block >= 512 else 1),
        )  # fmt: skip
    return out


@ops.rms_norm.variant("triton")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ops.rms_norm. x [T, H] or [T, heads, H], of any dtype and strides but the last one's."""
    return _launch(x, weight, eps, None, out)


@ops.add_rms_norm.variant("triton")
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.add_rms_norm. x [T, H], or [parts, T, H]: what the parts of a split product come to is summed here."""
    return _launch(x, weight, eps, residual, out), residual
