"""Llama (Touvron et al. 2023) and Mistral (Jiang et al. 2023): Mistral adds a sliding window, which the spec names."""

from __future__ import annotations

from headrace.models.blocks import CausalLM, DecoderLayer, Parts, refuse


def layer(parts: Parts, index: int) -> DecoderLayer:
    name = f"model.layers.{index}"
    return DecoderLayer(
        input_norm=parts.norm(f"{name}.input_layernorm"),
        attention=parts.attention(f"{name}.self_attn", index),
        post_norm=parts.norm(f"{name}.post_attention_layernorm"),
        mlp=parts.gated_mlp(f"{name}.mlp"),
    )


def build(parts: Parts) -> CausalLM:
    refuse(parts.spec, qk_norm=parts.spec.qk_norm)
    return CausalLM(parts, layer)
