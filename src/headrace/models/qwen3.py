"""Qwen3 (Yang et al. 2025): a Llama whose query and key heads are normalised before they are rotated."""

from __future__ import annotations

from headrace.models.blocks import CausalLM, Parts, refuse
from headrace.models.llama import layer


def build(parts: Parts) -> CausalLM:
    if not parts.spec.qk_norm:
        raise ValueError("a qwen3 model normalises q and k: its spec must say qk_norm")
    refuse(parts.spec, mlp_bias=parts.spec.mlp_bias)
    return CausalLM(parts, layer)
