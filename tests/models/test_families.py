"""Every family against transformers in float32: whole, in chunks, token by token, and in company, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.harness import Stepper
from models.oracles import assert_close, oracle, oracle_logits, ours, prompt

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
