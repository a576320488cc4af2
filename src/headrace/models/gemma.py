"""Gemma 2 (Gemma Team 2024) and Gemma 3 (2025): norms before and after both blocks.

Gemma 2 caps the scores of attention and of tokens, Gemma 3 normalises q and k and rotates its window layers with a
base of their own; both scale embeddings by sqrt(hidden size), rounded to the arithmetic's type. The spec says all that.
"""

from __future__ import annotations

from headrace.models.blocks import CausalLM, DecoderLayer, Parts, refuse, require


def layer(parts: Parts, index: int) -> DecoderLayer:
    name = f"model.layers.{index}"
    return DecoderLayer(
        before_attention=parts.norm(f"{name}.input_layernorm"),
        attention=parts.attention(f"{name}.self_attn", index),
        after_attention=parts.norm(f"{name}.post_attention_layernorm"),
        before_mlp=parts.norm(f"{name}.pre_feedforward_layernorm"),
        mlp=parts.gated_mlp(f"{name}.mlp"),
        after_mlp=parts.norm(f"{name}.post_feedforward_layernorm"),
    )


def build2(parts: Parts) -> CausalLM:
    refuse(parts.spec, qk_norm=parts.spec.qk_norm, moe=parts.spec.moe)
    return CausalLM(parts, layer)


def build3(parts: Parts) -> CausalLM:
    require(parts.spec, qk_norm=parts.spec.qk_norm)
    refuse(parts.spec, moe=parts.spec.moe)
    return CausalLM(parts, layer)
