"""What a CUDA GPU gives a process. torch is imported only where a GPU seems to be there or was asked for."""

from __future__ import annotations

import glob
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuFacts:
    """One GPU, as this process finds it."""

    name: str
    capability: tuple[int, int]
    free_memory: int  # bytes
    total_memory: int  # bytes
    num_processors: int


def maybe_present() -> bool:
    """Whether the system shows an NVIDIA GPU, without importing anything heavy."""
    return bool(glob.glob("/dev/nvidia[0-9]*"))


def unavailable_reason() -> str | None:
    """Why no GPU can be used here, with the remedy; None: one can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed; pip install 'headrace[gpu]'"
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} was built without CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU: check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed; pip install 'headrace[gpu]'"
    capability = torch.cuda.get_device_capability(0)
    if capability < (8, 0):
        name = torch.cuda.get_device_name(0)
        return f"{name} has compute capability {capability[0]}.{capability[1]}; bfloat16 kernels need 8.0 or newer"
    return None


def gpu_facts() -> GpuFacts:
    """The first visible GPU; call where `unavailable_reason` is None."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return GpuFacts(
        properties.name, (properties.major, properties.minor), free, total, properties.multi_processor_count
    )
