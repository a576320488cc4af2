"""Families beyond the Llama-like: what absent keys mean, nested configs, per-layer settings, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from test_hf_config import BASE

from headrace.layers.weights import WeightSource
from headrace.loading.checkpoint import open_checkpoint
from headrace.loading.errors import CheckpointError
from headrace.loading.hf_config import spec_from_config
from headrace.loading.hf_families import ARCHITECTURES
from headrace.models.registry import build_model, supported
from headrace.models.spec import ModelSpec, MoESpec, RopeSpec


def spec(architecture: str, **changes: Any) -> ModelSpec:
    return spec_from_config(BASE | {"architectures": [architecture]} | changes)


def test_every_family_has_an_architecture() -> None:
    assert set(ARCHITECTURES.values()) == set(supported())


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers")
CONFIGS = {
    "phi3": transformers.Phi3Config,
    "olmo2": transformers.Olmo2Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3": transformers.Gemma3TextConfig,
    "mixtral": transformers.MixtralConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "olmoe": transformers.OlmoeConfig,
    "gpt_oss": transformers.GptOssConfig,
}


@pytest.mark.parametrize("family", CONFIGS)
def test_what_a_config_leaves_out_means_what_transformers_means(family: str) -> None:
    architecture = next(name for name, known in ARCHITECTURES.items() if known == family)
    full = CONFIGS[family](architectures=[architecture]).to_dict()
    short = {key: value for key, value in full.items() if key in ("architectures", "vocab_size", *SIZES)}
    short["num_attention_heads"] = full["num_attention_heads"]
    ends = {"bos_token_id": None, "eos_token_id": None}  # a config that names none has none, but for Gemma
    one, two = (spec_from_config(each | ({} if "gemma" in family else ends)) for each in (full, short))
    assert one == two


def test_gemma3_as_published_before_transformers_5() -> None:
    """The text_config of google/gemma-3-4b-it, which names little."""
    inner = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
    found = spec_from_config(outer | {"text_config": inner})
    assert (found.num_heads, found.num_kv_heads, found.head_dim, found.vocab_size) == (8, 4, 256, 262_208)
    assert found.rope == RopeSpec(theta=1e6, kind="linear", factor=8.0) and found.local_rope == RopeSpec()
    assert found.windows[:7] == (1024,) * 5 + (None, 1024) and found.windows.count(None) == 5
    assert found.eos_token_ids == {1, 106} and found.bos_token_id == 2 and found.tie_word_embeddings
    assert found.attention_scale == 1 / 16 and found.embedding_scale == 2560**0.5 and found.logit_soft_cap is None


def test_gemma3_with_vision_runs_its_language_model(tmp_path: Path) -> None:
    text = dict(vocab_size=101, hidden_size=48, intermediate_size=80, num_hidden_layers=3, head_dim=8)
    text |= dict(num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=256)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    vision |= dict(image_size=28, patch_size=14)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    model = build_model(checkpoint.spec, WeightSource(checkpoint))
    assert checkpoint.spec.family == "gemma3" and len(model.layers) == 3


def test_windows_by_family() -> None:
    assert spec("Phi3ForCausalLM", sliding_window=9).windows == (9,) * 4
    assert spec("Phi3ForCausalLM", sliding_window=None).windows == () == spec("Phi3ForCausalLM").windows
    assert spec("Gemma2ForCausalLM", sliding_window=9).windows == (9, None, 9, None)
    assert spec("Gemma3ForCausalLM", sliding_window=9, sliding_window_pattern=2).windows == (9, None, 9, None)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, sliding_window=9)
    assert spec("Qwen3MoeForCausalLM", **experts).windows == ()
    assert spec("Qwen3MoeForCausalLM", **experts, use_sliding_window=True).windows == (9,) * 4
    kinds = ["full_attention", "sliding_attention"] * 2
    assert spec("GptOssForCausalLM", sliding_window=9, layer_types=kinds).windows == (None, 9, None, 9)


def test_experts() -> None:
    settings = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    found = spec("Qwen3MoeForCausalLM", **settings, decoder_sparse_step=2, mlp_only_layers=[3])
    assert found.moe == MoESpec(4, 2, 8, normalise=False, dense_layers=frozenset({0, 2, 3}))
    assert found.layer_moe(0) is None and found.layer_moe(1) is found.moe
    mixtral = spec("MixtralForCausalLM", num_local_experts=4)
    assert mixtral.moe == MoESpec(4, 2, 96) and not mixtral.qk_norm
    with pytest.raises(CheckpointError, match="a token cannot have 5 of 4 experts"):
        spec("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=5)
    with pytest.raises(CheckpointError, match="mlp_only_layers"):
        spec("Qwen3MoeForCausalLM", **settings, mlp_only_layers="all")


def test_early_phi3_says_yarn_for_longrope() -> None:
    factors = dict(short_factor=[1.0] * 8, long_factor=[2.0] * 8)
    for kind in ("su", "yarn", "longrope"):
        found = spec("Phi3ForCausalLM", rope_scaling=dict(factors, type=kind), original_max_position_embeddings=64)
        assert found.rope.kind == "longrope" and found.rope.factor == 4.0 and found.rope.original_max_position == 64


@pytest.mark.parametrize(
    ("architecture", "changes", "problem"),
    [
        ("OlmoeForCausalLM", dict(clip_qkv=8.0), "clip_qkv is not supported"),
        ("Gemma3ForCausalLM", dict(use_bidirectional_attention=True), "only causal models"),
        ("GptOssForCausalLM", dict(swiglu_limit=9.0), "swiglu_limit 9.0 are not supported"),
        ("Gemma2ForCausalLM", dict(layer_types=["chunked_attention"] * 4), "'chunked_attention' is not supported"),
    ],
)
def test_what_would_be_ignored_is_refused(architecture: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        spec(architecture, **changes)


def test_mxfp4_is_refused_with_a_remedy(tmp_path: Path) -> None:
    config = BASE | {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"MXFP4.*convert it to bf16 first.*dequantize=True"):
        open_checkpoint(tmp_path)
