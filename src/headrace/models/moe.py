"""Mixtures of experts with a Llama's layer around them: Mixtral (Jiang et al. 2024), Qwen3-MoE (Yang et al. 2025),
OLMoE (Muennighoff et al. 2024) and GPT-OSS (OpenAI 2025). The spec says how experts are chosen and in which layers."""

from __future__ import annotations

from headrace.layers.moe import ExpertLayout, ExpertNames
from headrace.models.blocks import CausalLM, DecoderLayer, MixtureOfExperts, Parts, refuse, require

MIXTRAL = ExpertNames(gate="w1", up="w3", down="w2")


def layer(parts: Parts, index: int) -> DecoderLayer:
    name = f"model.layers.{index}"
    return DecoderLayer(
        before_attention=parts.norm(f"{name}.input_layernorm"),
        attention=parts.attention(f"{name}.self_attn", index),
        before_mlp=parts.norm(f"{name}.post_attention_layernorm"),
        mlp=EXPERTS[parts.spec.family](parts, name) if parts.spec.layer_moe(index) else parts.gated_mlp(f"{name}.mlp"),
    )


def mixtral_experts(parts: Parts, layer_name: str) -> MixtureOfExperts:
    published = f"{layer_name}.block_sparse_moe"
    return parts.moe(published if f"{published}.gate.weight" in parts.source else f"{layer_name}.mlp", MIXTRAL)


def plain_experts(parts: Parts, layer_name: str) -> MixtureOfExperts:
    return parts.moe(f"{layer_name}.mlp", ExpertNames())


def gpt_oss_experts(parts: Parts, layer_name: str) -> MixtureOfExperts:
    return parts.moe(f"{layer_name}.mlp", ExpertNames(router="router"), layout=ExpertLayout.IN_OUT)


EXPERTS = {
    "mixtral": mixtral_experts,
    "qwen3_moe": plain_experts,
    "olmoe": plain_experts,
    "gpt_oss": gpt_oss_experts,
}


def build(parts: Parts) -> CausalLM:
    spec = parts.spec
    require(spec, moe=spec.moe)
    if spec.family in ("qwen3_moe", "olmoe"):
        require(spec, qk_norm=spec.qk_norm)
    else:
        refuse(spec, qk_norm=spec.qk_norm)
    return CausalLM(parts, layer)
