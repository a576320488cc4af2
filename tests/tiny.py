"""A tiny random Llama with a byte-level tokenizer and a chat template, written as a Hugging Face folder; no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    window: int | None = None,
    layers: int = 2,
    special: tuple[str, ...] = (),
    eos: str = EOS,
    template: str = TEMPLATE,
    hidden: int = 48,
    inner: int = 80,
    dim: int = 12,
    mtp: bool = False,
) -> Path:
    """Random weights of std 0.15, so that logits differ clearly from token to token. `special`: more special tokens.

    `mtp`: a module for multi-token prediction beside the model, as DeepSeek-V3 stores it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    heads, kv_heads = 4, 2
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([eos, "<|user|>", "<|assistant|>", "<|system|>", *special])
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    config = {
        "architectures": ["MistralForCausalLM" if window else "LlamaForCausalLM"],
        "model_type": "mistral" if window else "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.token_to_id(eos),
    }
    if window:
        config["sliding_window"] = window
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "chat_template": template})
    )

    def random(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.15).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": random(vocab_size, hidden) * 4,
        "model.norm.weight": 1 + random(hidden),
        "lm_head.weight": random(vocab_size, hidden),
    }
    for layer in range(layers + mtp):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": random(heads * dim, hidden),
            prefix + "self_attn.k_proj.weight": random(kv_heads * dim, hidden),
            prefix + "self_attn.v_proj.weight": random(kv_heads * dim, hidden),
            prefix + "self_attn.o_proj.weight": random(hidden, heads * dim),
            prefix + "mlp.gate_proj.weight": random(inner, hidden),
            prefix + "mlp.up_proj.weight": random(inner, hidden),
            prefix + "mlp.down_proj.weight": random(hidden, inner),
            prefix + "input_layernorm.weight": 1 + random(hidden),
            prefix + "post_attention_layernorm.weight": 1 + random(hidden),
        }
    if mtp:
        prefix = f"model.layers.{layers}."
        tensors |= {prefix + f"{name}.weight": 1 + random(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
        tensors |= {
            prefix + "eh_proj.weight": random(hidden, 2 * hidden),
            prefix + "embed_tokens.weight": tensors["model.embed_tokens.weight"].copy(),
            prefix + "shared_head.head.weight": tensors["lm_head.weight"].copy(),
        }
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_tiny_mixtral(folder: Path, *, experts: int = 4, **shape: Any) -> Path:
    """A tiny Mixtral, each token through two of its experts."""
    write_tiny_llama(folder, **shape)
    config = json.loads((folder / "config.json").read_text())
    config.update(
        architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=experts, num_experts_per_tok=2,
        sliding_window=None,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tensors, rng = load_file(folder / "model.safetensors"), np.random.default_rng(1)
    for name in [name for name in tensors if ".mlp." in name]:
        matrix = tensors.pop(name)
        layer, kind = name.split(".mlp.")[0], {"gate": "w1", "down": "w2", "up": "w3"}[name.split(".mlp.")[1][:-12]]
        for expert in range(experts):
            noise = rng.standard_normal(matrix.shape, np.float32) * 0.1
            tensors[f"{layer}.block_sparse_moe.experts.{expert}.{kind}.weight"] = matrix.astype(np.float32) + noise
        tensors[f"{layer}.block_sparse_moe.gate.weight"] = rng.standard_normal(
            (experts, config["hidden_size"]), np.float32
        )
    save_file(tensors, folder / "model.safetensors")
    return folder
