"""Operations, one file each. Call them as `ops.rms_norm(...)`; `registry` says how an implementation is chosen."""

from headrace.ops.activation import gelu_mul, gelu_tanh_mul, silu_mul
from headrace.ops.build_step import build_step
from headrace.ops.embedding import embedding
from headrace.ops.kv_write import kv_write
from headrace.ops.linear import linear
from headrace.ops.noise import gumbel_noise
from headrace.ops.norm import add_rms_norm, rms_norm
from headrace.ops.paged_attention import paged_attention
from headrace.ops.rope import rope

__all__ = [
    "add_rms_norm",
    "build_step",
    "embedding",
    "gelu_mul",
    "gelu_tanh_mul",
    "gumbel_noise",
    "kv_write",
    "linear",
    "paged_attention",
    "rms_norm",
    "rope",
    "silu_mul",
]
