"""Names of tensors: GGUF's to Hugging Face's, and a language model's inside a larger checkpoint.

Sources: the tensor names of the GGUF specification (ggml-org/ggml, docs/gguf.md) and of `gguf.constants`; the names
that transformers saves.
"""

from __future__ import annotations

import re

GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = GGUF_NAMES | _AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
_BY_FAMILY = {
    "phi3": GGUF_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "olmo2": GGUF_NAMES | _AFTER,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "mixtral": GGUF_NAMES | _EXPERTS,
    "qwen3_moe": GGUF_NAMES | _EXPERTS,
    "olmoe": GGUF_NAMES | _EXPERTS,
    "gpt_oss": GGUF_NAMES
    | _EXPERTS
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        "attn_sinks": "self_attn.sinks",
    },
}
_BARE = ("self_attn.sinks",)  # parameters of their own: no .weight behind the name
# Where a vision-language checkpoint keeps its language model: as published, and as transformers 5 names it in memory.
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_OTHER_MODALITIES = ("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.")


def hf_name(name: str, family: str = "llama") -> str:
    """Hugging Face's name of a GGUF tensor; a tensor that has none keeps its own, so that it is reported as unused."""
    stem, _, kind = name.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    known = _BY_FAMILY.get(family, GGUF_NAMES).get(match[2] if match else stem)
    if known is None or kind not in ("weight", "bias"):
        return name
    full = f"model.layers.{match[1]}.{known}" if match else known
    return full if known in _BARE else f"{full}.{kind}"


def text_name(name: str) -> str | None:
    """A tensor's name as the language model alone would have it; None for parts that see or hear."""
    if name.startswith(_OTHER_MODALITIES):
        return None
    for prefix, ours in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name
