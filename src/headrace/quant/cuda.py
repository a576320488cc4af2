"""What a GPU process computes with: Triton kernels where there are any, the references on torch elsewhere."""

from __future__ import annotations

import torch

from headrace.ops.registry import bind
from headrace.ops.triton import moe, norm, pointwise  # noqa: F401  (they register their kernels)
from headrace.ops.triton.runtime import RUNTIME
from headrace.quant.base import QuantScheme
from headrace.quant.dense import Dense


def bind_cuda(device: torch.device, dtype: torch.dtype, invariant: bool = False) -> QuantScheme:
    """Bind the ops for this process and return the scheme that stores weights for them. float32 is computed as such,
    never as TF32. `invariant`: see Runtime."""
    RUNTIME.activation, RUNTIME.invariant = dtype, invariant
    torch.backends.cuda.matmul.allow_tf32 = False
    bind(("triton",))
    return Dense(device, dtype)
