"""Qwen3 (Yang et al. 2025): a Llama whose query and key heads are normalised before they are rotated."""

from __future__ import annotations

from headrace.models.blocks import CausalLM, Parts, refuse, require
from headrace.models.llama import layer


def build(parts: Parts) -> CausalLM:
    require(parts.spec, qk_norm=parts.spec.qk_norm)
    refuse(parts.spec, mlp_bias=parts.spec.mlp_bias, moe=parts.spec.moe)
    return CausalLM(parts, layer)
