"""A checkpoint's weights, dequantised, as a Hugging Face folder: so that peers run exactly the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.loading.checkpoint import LoadedCheckpoint

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def write_hf_folder(checkpoint: LoadedCheckpoint, folder: Path) -> Path:
    """Write config.json and float32 weights (4 bytes a parameter) into `folder`. ValueError for a model whose config
    cannot be told from its spec yet."""
    from safetensors.numpy import save_file

    config = _config(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: checkpoint.read(name).copy(order="C") for name in checkpoint.names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def _config(checkpoint: LoadedCheckpoint) -> dict[str, Any]:
    spec = checkpoint.spec
    plain = spec.rope.kind == "default" and not any(spec.windows) and spec.moe is None
    if spec.family not in _ARCHITECTURES or not plain:
        raise ValueError(
            f"{checkpoint.name}: only {', '.join(_ARCHITECTURES)} with plain RoPE and full attention are written for "
            f"peers; this is {spec.family} with {spec.rope.kind} RoPE. Give a Hugging Face folder instead"
        )
    return {
        "architectures": [_ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": spec.activation,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_position,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_bias": spec.qkv_bias,
        "rope_theta": spec.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope.theta},
        "eos_token_id": sorted(spec.eos_token_ids),
        "torch_dtype": "float32",
    }
