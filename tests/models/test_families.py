"""Every family against transformers in float32: whole, in chunks, token by token, and in company, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.layers.weights import WeightSource
from headrace.loading.dummy import DummyCheckpoint, tensor_shapes
from headrace.loading.hf_config import spec_from_config
from headrace.models.registry import build_model
from headrace.models.spec import RopeSpec
from models.harness import DictCheckpoint, Stepper
from models.oracles import assert_close, oracle, oracle_logits, ours, prompt, published, state

LENGTH = 150  # more than two tiles of attention

LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=3.0)
DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
YARN_SETTINGS = dict(YARN, attention_factor=1.0, beta_fast=16.0, beta_slow=2.0, truncate=False)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=1e4,
    factor=4.0,
    original_max_position_embeddings=64,
    short_factor=[1.0, 1.1, 1.2, 1.3],
    long_factor=[1.0, 2.0, 3.0, 4.0],
)
LINEAR_GLOBAL = dict(
    full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
    sliding_attention=dict(rope_type="default", rope_theta=1e4),
)
PHI_LONGROPE = dict(LONGROPE, partial_rotary_factor=1.0)
PHI_PARTIAL = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
GEMMA2: dict[str, Any] = dict(head_dim=8, query_pre_attn_scalar=11, sliding_window=40, tie_word_embeddings=True)
GEMMA3: dict[str, Any] = dict(head_dim=8, query_pre_attn_scalar=11, sliding_window=40, tie_word_embeddings=True)
EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, intermediate_size=24)
QWEN_MOE: dict[str, Any] = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20, head_dim=8)
GPT_OSS: dict[str, Any] = dict(EXPERTS, num_local_experts=5, head_dim=8, sliding_window=40)
GPT_YARN = dict(rope_type="yarn", rope_theta=1.5e5, factor=32.0, truncate=False, original_max_position_embeddings=64)
SHARP = dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", dict(tie_word_embeddings=True)),
    "llama-biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "llama-head-dim": ("llama", dict(head_dim=10, hidden_size=45, num_attention_heads=9, num_key_value_heads=1)),
    "llama-mha-gelu": ("llama", dict(num_key_value_heads=6, hidden_act="gelu")),
    "llama-gelu-tanh": ("llama", dict(hidden_act="gelu_pytorch_tanh")),
    "llama-linear": ("llama", dict(rope_parameters=LINEAR)),
    "llama-dynamic": ("llama", dict(rope_parameters=DYNAMIC)),
    "llama-yarn": ("llama", dict(rope_parameters=YARN)),
    "llama-yarn-settings": ("llama", dict(rope_parameters=YARN_SETTINGS)),
    "llama-yarn-mscale": ("llama", dict(rope_parameters=dict(YARN, mscale=0.7, mscale_all_dim=1.3))),
    "llama-llama3": ("llama", dict(rope_parameters=LLAMA3)),
    "llama-longrope": ("llama", dict(rope_parameters=LONGROPE)),
    "mistral-window": ("mistral", dict(sliding_window=40)),
    "mistral-window-long": ("mistral", dict(sliding_window=90)),
    "mistral-full": ("mistral", dict(sliding_window=None)),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2-mixed-windows": ("qwen2", dict(use_sliding_window=True, sliding_window=24, max_window_layers=1)),
    "qwen3": ("qwen3", dict(head_dim=12)),
    "phi3": ("phi3", {}),
    "phi3-longrope": ("phi3", dict(original_max_position_embeddings=64, rope_parameters=PHI_LONGROPE)),
    "phi3-partial-window": ("phi3", dict(rope_parameters=PHI_PARTIAL, sliding_window=40)),
    "phi3-tied": ("phi3", dict(tie_word_embeddings=True)),
    "olmo2": ("olmo2", {}),
    "olmo2-biases-tied": ("olmo2", dict(attention_bias=True, tie_word_embeddings=True)),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2-caps-bite": ("gemma2", dict(GEMMA2, **SHARP)),
    "gemma2-no-caps-untied": (
        "gemma2",
        dict(GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False),
    ),
    "gemma3": ("gemma3", dict(GEMMA3, num_hidden_layers=7)),
    "gemma3-linear-untied": (
        "gemma3",
        dict(GEMMA3, num_hidden_layers=7, rope_parameters=LINEAR_GLOBAL, tie_word_embeddings=False),
    ),
    "gemma3-cap-pattern": ("gemma3", dict(GEMMA3, sliding_window_pattern=2, final_logit_softcapping=3.0)),
    "mixtral": ("mixtral", dict(EXPERTS, num_local_experts=5)),
    "mixtral-window-tied": (
        "mixtral",
        dict(EXPERTS, num_local_experts=4, sliding_window=40, tie_word_embeddings=True),
    ),
    "qwen3-moe": ("qwen3_moe", dict(QWEN_MOE, norm_topk_prob=True)),
    "qwen3-moe-unnormalised-tied": ("qwen3_moe", dict(QWEN_MOE, tie_word_embeddings=True)),
    "qwen3-moe-sparse-step": ("qwen3_moe", dict(QWEN_MOE, num_hidden_layers=4, decoder_sparse_step=2)),
    "qwen3-moe-dense-layers": ("qwen3_moe", dict(QWEN_MOE, mlp_only_layers=[0, 2], attention_bias=True)),
    "olmoe": ("olmoe", dict(EXPERTS, num_experts=6)),
    "olmoe-normalised-tied": ("olmoe", dict(EXPERTS, num_experts=6, norm_topk_prob=True, tie_word_embeddings=True)),
    "gpt-oss": ("gpt_oss", dict(GPT_OSS, rope_parameters=GPT_YARN)),
    "gpt-oss-plain-tied": (
        "gpt_oss",
        dict(GPT_OSS, rope_parameters=dict(rope_type="default", rope_theta=1e4), tie_word_embeddings=True),
    ),
    "qwen3-biases-tied": ("qwen3", dict(attention_bias=True, tie_word_embeddings=True, head_dim=8)),
}


@pytest.mark.parametrize("case", CASES)
def test_whole_chunked_decoded_and_mixed(case: str) -> None:
    family, changes = CASES[case]
    reference = oracle(family, **changes)
    model = ours(reference)
    assert model.num_parameters == sum(p.numel() for p in reference.parameters())
    ids = prompt(LENGTH)
    whole = Stepper(model, 1, LENGTH).step({0: ids})[0]
    assert_close(whole, oracle_logits(reference, ids))

    chunked = Stepper(model, 1, LENGTH, seed=1).chunks(0, ids, [1, 62, 2, 17, 60])  # the rest is decoded
    np.testing.assert_array_equal(chunked, whole)

    # In company: three other rows at other lengths, in changing order, blocks of another size and place.
    others = {row: prompt(LENGTH, seed=row) for row in (1, 2, 3)}
    stepper = Stepper(model, 4, LENGTH, block_size=32, seed=2)
    first = stepper.step({2: others[2][:70], 0: ids[:100], 1: others[1][:5]}, padding=3)
    second = stepper.step({3: others[3][:33], 1: others[1][5:90], 0: ids[100:130]})
    parts = [first[0], second[0]]
    for position in range(130, LENGTH):
        step = {row: [others[row][stepper.lengths[row]]] for row in (3, 2)}
        step[0] = [ids[position]]
        step[1] = others[1][stepper.lengths[1] : stepper.lengths[1] + 3]
        parts.append(stepper.step(step)[0])
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_dynamic_rope_beyond_the_trained_length_follows_decoding() -> None:
    reference = oracle("llama", max_position_embeddings=64, rope_parameters=DYNAMIC)
    model = ours(reference)
    ids = prompt(96)
    with torch.no_grad():
        answer = reference(torch.tensor([ids[:64]]), use_cache=True)
        expected = [answer.logits[0].numpy()]
        for token in ids[64:]:
            answer = reference(torch.tensor([[token]]), cache=answer.past_key_values, use_cache=True)
            expected.append(answer.logits[0].numpy())
    assert_close(Stepper(model, 1, 96).chunks(0, ids, [50, 30]), np.concatenate(expected))


@pytest.mark.parametrize("block_size", [4, 64, 128])
def test_block_size_and_placement_change_no_bit(block_size: int) -> None:
    model = ours(oracle("mistral", sliding_window=70))
    ids = prompt(200)
    whole = Stepper(model, 1, 200, shuffle=False, stale=0.0).step({0: ids})[0]
    np.testing.assert_array_equal(Stepper(model, 1, 200, block_size, seed=3).step({0: ids})[0], whole)


def test_stale_numbers_and_neighbours_change_no_bit() -> None:
    model = ours(oracle("qwen3", head_dim=8))
    ids = prompt(70)

    def alone_and_among(seed: int, stale: float) -> np.ndarray:
        stepper = Stepper(model, 8, 80, stale=stale)
        stepper.step({row: prompt(20 + row, seed + row) for row in range(1, 8)} | {0: ids[:69]})
        return stepper.step({row: [seed] for row in range(1, 8)} | {0: ids[69:]})[0]

    np.testing.assert_array_equal(alone_and_among(10, np.nan), alone_and_among(30, 5.0))


@pytest.mark.parametrize("case", ["mixtral", "qwen3-moe", "olmoe"])
def test_merged_experts_are_the_single_ones(case: str) -> None:
    family, changes = CASES[case]
    reference = oracle(family, **changes)
    merged = state(reference)
    assert "model.layers.0.mlp.experts.gate_up_proj" in merged and "block_sparse_moe" not in "".join(merged)
    ids = prompt(20)
    found = [Stepper(ours(reference, tensors), 1, 20).step({0: ids})[0] for tensors in (merged, None)]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("gemma2", dict(attention_soft_cap=None)),
        ("gemma2", dict(logit_soft_cap=None)),
        ("gemma2", dict(attention_scale=None)),
        ("gemma2", dict(embedding_scale=1.0)),
        ("gemma2", dict(norm_offset=0.0)),
        ("gemma2", dict(windows=())),
        ("gemma2", dict(activation="gelu")),
        ("gemma3", dict(local_rope=None)),
        ("gemma3-linear-untied", dict(rope=RopeSpec(theta=1e6))),
        ("phi3-partial-window", dict(rope=RopeSpec())),
        ("gpt-oss", dict(activation="silu")),
    ],
)
def test_every_switch_is_felt(case: str, changes: dict[str, Any]) -> None:
    """The comparisons above would notice if a setting had no effect."""
    family, settings = CASES[case]
    model = ours(oracle(family, **settings))
    checkpoint = DictCheckpoint(published(oracle(family, **settings)))
    other = build_model(replace(model.spec, **changes), WeightSource(checkpoint))
    ids = prompt(LENGTH)
    one, two = (Stepper(each, 1, LENGTH).step({0: ids})[0] for each in (model, other))
    assert np.abs(one - two).max() > 1e-4 * np.abs(one).max()


def test_sinks_take_probability() -> None:
    reference = oracle("gpt_oss", **CASES["gpt-oss"][1])
    tensors = published(reference)
    without = {name: values - 1e4 * name.endswith("sinks") for name, values in tensors.items()}
    one, two = (Stepper(ours(reference, each), 1, LENGTH).step({0: prompt(LENGTH)})[0] for each in (tensors, without))
    assert np.abs(one - two).max() > 1e-2


@pytest.mark.parametrize("case", CASES)
def test_dummy_weights_are_those_that_the_family_takes(case: str) -> None:
    family, changes = CASES[case]
    reference = oracle(family, **changes)
    spec = spec_from_config(reference.config.to_dict())
    assert tensor_shapes(spec) == {name: tensor.shape for name, tensor in published(reference).items()}
    model = build_model(spec, WeightSource(DummyCheckpoint(spec)))
    logits = Stepper(model, 1, 20).step({0: prompt(20)})[0]
    assert np.isfinite(logits).all() and logits.std() > 1e-3
