"""Llama (Touvron et al. 2023), Mistral (Jiang et al. 2023: a sliding window) and Phi-3 (Abdin et al. 2024: fused
projections, partial rotation, LongRoPE): one structure, whose differences the spec names."""

from __future__ import annotations

from headrace.models.blocks import CausalLM, DecoderLayer, Parts, refuse


def layer(parts: Parts, index: int) -> DecoderLayer:
    name = f"model.layers.{index}"
    return DecoderLayer(
        before_attention=parts.norm(f"{name}.input_layernorm"),
        attention=parts.attention(f"{name}.self_attn", index),
        before_mlp=parts.norm(f"{name}.post_attention_layernorm"),
        mlp=parts.gated_mlp(f"{name}.mlp"),
    )


def build(parts: Parts) -> CausalLM:
    refuse(parts.spec, qk_norm=parts.spec.qk_norm, moe=parts.spec.moe)
    return CausalLM(parts, layer)
