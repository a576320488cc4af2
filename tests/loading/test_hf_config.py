"""L10, N03, N04 (as far as a RopeSpec goes), and what a config leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.loading.errors import CheckpointError
from headrace.loading.hf_config import spec_from_config
from headrace.models.spec import ModelSpec, RopeSpec

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}


def spec(**changes: Any) -> ModelSpec:
    return spec_from_config(BASE | changes)


def rope(**changes: Any) -> RopeSpec:
    return spec(**changes).rope


# L10


def test_explicit_head_dim() -> None:
    found = spec(hidden_size=512, num_attention_heads=9, num_key_value_heads=1, head_dim=56)
    assert found.head_dim == 56 and found.q_size == 504


def test_null_head_dim_is_hidden_over_heads() -> None:
    assert spec(head_dim=None).head_dim == 16


def test_head_dim_that_does_not_follow_is_refused() -> None:
    with pytest.raises(CheckpointError, match="head_dim is missing"):
        spec(num_attention_heads=6)


# N03

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def test_yarn_spellings_agree() -> None:
    found = {
        rope(rope_theta=5000.0, rope_scaling={"type": "yarn", **YARN}),
        rope(rope_theta=5000.0, rope_scaling={"rope_type": "yarn", **YARN}),
        rope(rope_parameters={"rope_type": "yarn", "rope_theta": 5000.0, **YARN}),
    }
    assert found == {RopeSpec(theta=5000.0, kind="yarn", factor=4.0, original_max_position=64)}


def test_default_is_null() -> None:
    assert rope(rope_scaling={"rope_type": "default"}) == rope(rope_scaling=None) == rope() == RopeSpec()


def test_explicit_attention_factor_is_kept() -> None:
    assert rope(rope_scaling={"type": "yarn", "attention_factor": 1.0, **YARN}).attention_factor == 1.0


@pytest.mark.parametrize("kind", ["foo", "mrope", 7])
def test_unknown_kind_is_refused(kind: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{kind!r} is not supported"):
        rope(rope_scaling={"rope_type": kind, "factor": 2.0})


def test_per_layer_rope_is_refused() -> None:
    with pytest.raises(CheckpointError, match="between layers"):
        rope(rope_parameters={"full_attention": {"rope_type": "default"}})


# N04 and the other kinds


def test_llama3() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    found = rope(rope_scaling=scaling | {"original_max_position_embeddings": 64})
    assert found == RopeSpec(kind="llama3", factor=8.0, original_max_position=64)


def test_dynamic_and_linear() -> None:
    dynamic = rope(max_position_embeddings=64, rope_scaling={"type": "dynamic", "factor": 2})
    assert dynamic == RopeSpec(kind="dynamic", factor=2.0, original_max_position=64)
    assert rope(rope_scaling={"type": "linear", "factor": 2.5}) == RopeSpec(kind="linear", factor=2.5)
    with pytest.raises(CheckpointError, match="factor is missing"):
        rope(rope_scaling={"type": "linear"})


def test_longrope() -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2] * 8}
    found = rope(original_max_position_embeddings=64, rope_scaling=scaling)
    assert found.kind == "longrope" and found.factor == 4.0 and found.long_factor == (2.0,) * 8
    with pytest.raises(CheckpointError, match="short_factor must list 8"):
        rope(rope_scaling=scaling | {"short_factor": [1.0]})


def test_partial_rotation() -> None:
    assert rope(partial_rotary_factor=0.5).rotary_dim == 8


# Families


def test_biases_and_norms() -> None:
    llama = spec(attention_bias=True, mlp_bias=True)
    assert llama.qkv_bias and llama.output_bias and llama.mlp_bias and not llama.qk_norm
    qwen2 = spec(architectures=["Qwen2ForCausalLM"])
    assert qwen2.qkv_bias and not qwen2.output_bias and qwen2.family == "qwen2"
    qwen3 = spec(architectures=["Qwen3ForCausalLM"])
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.head_dim == 128


def test_windows() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert spec(**mistral, sliding_window=32).windows == (32,) * 4
    assert spec(**mistral, sliding_window=None).windows == ()
    assert spec(**mistral).windows == (4096,) * 4
    qwen2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "max_window_layers": 3}
    assert spec(**qwen2).windows == () == spec(**qwen2, use_sliding_window=False).windows
    assert spec(**qwen2, use_sliding_window=True).windows == (None, None, None, 32)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert spec(**qwen2, use_sliding_window=True, layer_types=kinds).windows == (32, None, 32, None)
    with pytest.raises(CheckpointError, match="layer_types"):
        spec(**qwen2, use_sliding_window=True, layer_types=kinds[:3])


@pytest.mark.parametrize("names", [["GPT2LMHeadModel"], [], None])
def test_unsupported_architectures_list_the_supported(names: Any) -> None:
    with pytest.raises(CheckpointError, match="LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"):
        spec(architectures=names)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": -1},
        {"hidden_size": "64"},
        {"vocab_size": None},
        {"num_key_value_heads": 3},
        {"rms_norm_eps": float("nan")},
        {"hidden_act": "relu"},
        {"tie_word_embeddings": "yes"},
        {"rope_theta": 0},
        {"rope_scaling": "yarn"},
        {"head_dim": 15},
    ],
)
def test_bad_values_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        spec(**changes)


def test_eos_ids_are_joined() -> None:
    assert spec_from_config(BASE | {"eos_token_id": [1, 2]}, eos=[2, 3]).eos_token_ids == {1, 2, 3}
    assert spec(eos_token_id=None).eos_token_ids == frozenset()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_transformers_saves(family: str) -> None:
    """A config object and our reading of what it writes agree."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{key: value for key, value in BASE.items() if key != "architectures"})
    found = spec_from_config(config.to_dict() | {"architectures": [f"{family.capitalize()}ForCausalLM"]})
    assert found.num_kv_heads == config.num_key_value_heads and found.norm_eps == config.rms_norm_eps
    assert found.rope.theta == config.rope_parameters["rope_theta"]
    assert found.head_dim == (getattr(config, "head_dim", None) or 16)
    assert found.windows == ((config.sliding_window,) * 4 if family == "mistral" else ())


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"])
def test_absurd_sizes_are_refused_at_once(key):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, "hidden_size": 8,
        "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    }  # fmt: skip
    spec_from_config(config)
    with pytest.raises(CheckpointError, match=f"{key} is 1099511627776"):
        spec_from_config({**config, key: 2**40})


@pytest.mark.parametrize("change", [{"architectures": [["a"]]}, {"architectures": [{}]}, {"hidden_act": ["silu"]}])
def test_values_of_other_types_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="is not supported"):
        spec(**change)
