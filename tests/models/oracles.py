"""Tiny random transformers models, and our models of the same config and weights."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from headrace.layers.weights import WeightSource
from headrace.loading.hf_config import spec_from_config
from headrace.models.blocks import CausalLM
from headrace.models.registry import build_model
from models.harness import DictCheckpoint

CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM),
    "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
}
SHAPE: dict[str, Any] = dict(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def oracle(family: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model in float32 with every weight, norm and bias randomised (std 0.15, norms around 1)."""
    config_class, model_class = CLASSES[family]
    config = config_class(**{**SHAPE, "tie_word_embeddings": False, **changes})
    config.architectures = [model_class.__name__]  # as save_pretrained writes it
    config._attn_implementation = "eager"
    model = model_class(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name and not family.startswith("gemma") else 0.0
            parameter.copy_(centre + 0.15 * torch.randn(parameter.shape, generator=generator))
    return model


def oracle_logits(model: Any, ids: list[int]) -> np.ndarray:
    """float32 [len(ids), V]."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def state(model: Any) -> dict[str, np.ndarray]:
    """Tensors under the names that transformers has in memory: experts merged."""
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def published(model: Any) -> dict[str, np.ndarray]:
    """Tensors as save_pretrained writes them: under the names of published checkpoints, a tied head left out."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def ours(model: Any, tensors: dict[str, np.ndarray] | None = None) -> CausalLM:
    """Our model of a transformers model's config and weights (as published, unless given)."""
    spec = spec_from_config(model.config.to_dict())
    return build_model(spec, WeightSource(DictCheckpoint(published(model) if tensors is None else tensors)))


def prompt(length: int, seed: int = 0, vocab: int = SHAPE["vocab_size"]) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab, length).tolist()


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    """Within 1e-4 of the largest logit."""
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    worst = np.abs(found - expected).max() / np.abs(expected).max()
    assert worst <= 1e-4, worst
