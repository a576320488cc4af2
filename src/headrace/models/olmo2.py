"""OLMo 2 (Walsh et al. 2025): norms after attention and mlp instead of before, and of all of q and all of k."""

from __future__ import annotations

from headrace.models.blocks import CausalLM, DecoderLayer, Parts, refuse, require


def layer(parts: Parts, index: int) -> DecoderLayer:
    name = f"model.layers.{index}"
    return DecoderLayer(
        attention=parts.attention(f"{name}.self_attn", index),
        after_attention=parts.norm(f"{name}.post_attention_layernorm"),
        mlp=parts.gated_mlp(f"{name}.mlp"),
        after_mlp=parts.norm(f"{name}.post_feedforward_layernorm"),
    )


def build(parts: Parts) -> CausalLM:
    require(parts.spec, qk_norm=parts.spec.qk_norm, qk_norm_whole=parts.spec.qk_norm_whole)
    refuse(parts.spec, moe=parts.spec.moe)
    return CausalLM(parts, layer)
