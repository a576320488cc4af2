"""Qwen2 and Qwen2.5 (Yang et al. 2024): a Llama with biases on q, k and v, which the spec names."""

from __future__ import annotations

from headrace.models.blocks import CausalLM, Parts, refuse
from headrace.models.llama import layer


def build(parts: Parts) -> CausalLM:
    spec = parts.spec
    refuse(spec, qk_norm=spec.qk_norm, output_bias=spec.output_bias, mlp_bias=spec.mlp_bias, moe=spec.moe)
    return CausalLM(parts, layer)
