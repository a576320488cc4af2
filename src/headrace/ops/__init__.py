"""Operations, one file each. Call them as `ops.rms_norm(...)`; `registry` says how an implementation is chosen."""

from headrace.ops.activation import ACTIVATIONS, gelu_mul, gelu_tanh_mul, silu_mul, swiglu_clamped_mul
from headrace.ops.build_step import build_step
from headrace.ops.copying import copied, joined
from headrace.ops.elementwise import add, scale, soft_cap
from headrace.ops.embedding import embedding
from headrace.ops.kv_write import kv_write
from headrace.ops.linear import linear
from headrace.ops.moe import Experts, Routing, moe
from headrace.ops.noise import gumbel_noise
from headrace.ops.norm import add_rms_norm, rms_norm
from headrace.ops.paged_attention import paged_attention
from headrace.ops.rope import rope

__all__ = [
    "ACTIVATIONS",
    "Experts",
    "Routing",
    "add",
    "add_rms_norm",
    "build_step",
    "copied",
    "embedding",
    "gelu_mul",
    "gelu_tanh_mul",
    "gumbel_noise",
    "joined",
    "kv_write",
    "linear",
    "moe",
    "paged_attention",
    "rms_norm",
    "rope",
    "scale",
    "silu_mul",
    "soft_cap",
    "swiglu_clamped_mul",
]
