"""Rotary frequencies by the numbers, against transformers, and tables that depend on nothing but the position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headrace.layers.rope import RotaryEmbedding, attention_factor, dynamic_base, inverse_frequencies
from headrace.models.spec import RopeSpec

YARN = RopeSpec(kind="yarn", factor=4.0, original_max_position=64)
LLAMA3 = RopeSpec(kind="llama3", factor=8.0, original_max_position=64)
YARN_FREQUENCIES = [1, 0.237170825, 0.05, 0.00790569415, 0.0025, 0.000790569415, 0.00025, 0.0000790569415]
LLAMA3_FREQUENCIES = [1, 0.244384599, 0.013042256, 0.00395284708, 0.00125, 0.000395284708, 0.000125, 0.0000395284708]
LLAMA3_DIVISORS = (1, 1.29397583, 7.66738513, 8, 8, 8, 8, 8)
LONG = dict(short_factor=(1.0,) * 4 + (1.5,) * 4, long_factor=(2.0,) * 4 + (4.0,) * 4)


def test_yarn_numbers() -> None:
    np.testing.assert_allclose(inverse_frequencies(YARN, 16, 256), YARN_FREQUENCIES, rtol=0, atol=1e-7)
    assert attention_factor(YARN, 256) == pytest.approx(1.13862944, abs=1e-8)
    explicit = RopeSpec(kind="yarn", factor=4.0, original_max_position=64, attention_factor=1.0)
    assert attention_factor(explicit, 256) == 1.0


def test_llama3_numbers_and_the_same_as_divisors() -> None:
    np.testing.assert_allclose(inverse_frequencies(LLAMA3, 16, 512), LLAMA3_FREQUENCIES, rtol=1e-6)
    divided = RopeSpec(divisors=LLAMA3_DIVISORS)
    np.testing.assert_allclose(inverse_frequencies(divided, 16, 512), LLAMA3_FREQUENCIES, rtol=1e-6)


def test_dynamic_number() -> None:
    assert dynamic_base(1e4, 16, 2.0, 96, 64) == pytest.approx(22081.7903, abs=1e-3)
    assert dynamic_base(1e4, 16, 2.0, 64, 64) == 1e4


def test_longrope_chooses_by_the_models_length() -> None:
    spec = RopeSpec(kind="longrope", original_max_position=64, **LONG)
    plain = inverse_frequencies(RopeSpec(), 16, 64)
    np.testing.assert_allclose(inverse_frequencies(spec, 16, 64), plain / spec.short_factor)
    np.testing.assert_allclose(inverse_frequencies(spec, 16, 65), plain / spec.long_factor)
    assert attention_factor(spec, 64) == 1.0
    assert attention_factor(spec, 256) == pytest.approx(np.sqrt(1 + np.log(4) / np.log(64)))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="'foo'"):
        inverse_frequencies(RopeSpec(kind="foo"), 16, 64)
    with pytest.raises(ValueError, match="pairs"):
        inverse_frequencies(RopeSpec(), 15, 64)
    with pytest.raises(ValueError, match="long_factor: 4 given, 8 expected"):
        inverse_frequencies(RopeSpec(kind="longrope", original_max_position=8, long_factor=(1.0,) * 4), 16, 64)
    with pytest.raises(ValueError, match="do not fit"):
        RotaryEmbedding(RopeSpec(rotary_dim=18), 16, 64)


CASES: list[tuple[RopeSpec, dict[str, Any]]] = [
    (RopeSpec(), dict(rope_type="default")),
    (RopeSpec(theta=5e5), dict(rope_type="default", rope_theta=5e5)),
    (RopeSpec(kind="linear", factor=2.5), dict(rope_type="linear", factor=2.5)),
    (RopeSpec(kind="dynamic", factor=2.0), dict(rope_type="dynamic", factor=2.0)),
    (YARN, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
    (LLAMA3, dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    (RopeSpec(kind="longrope", factor=4.0, original_max_position=64, **LONG), dict(rope_type="longrope", factor=4.0)),
]


@pytest.mark.parametrize(("spec", "parameters"), CASES, ids=lambda case: getattr(case, "kind", ""))
def test_angles_are_those_of_transformers(spec: RopeSpec, parameters: dict[str, Any]) -> None:
    parameters = {"rope_theta": 1e4, "original_max_position_embeddings": 64} | parameters
    if spec.kind == "longrope":
        parameters |= {name: list(values) for name, values in LONG.items()}
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=2, max_position_embeddings=2048, rope_parameters=parameters
    )
    positions = torch.arange(2048)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    found = RotaryEmbedding(spec, 16, 2048).at(positions.numpy())
    for ours, theirs in zip(found, (cos, sin), strict=True):
        # A frequency one float32 step apart turns position 2,047 by 1.2e-4 at most.
        np.testing.assert_allclose(ours, theirs[0, :, :8].numpy(), rtol=0, atol=1.5e-4)
        assert ours.dtype == np.float32


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_tables_do_not_depend_on_how_they_grew(kind: str) -> None:
    spec = RopeSpec(kind=kind, factor=2.0)
    once, grown = RotaryEmbedding(spec, 20, 128), RotaryEmbedding(spec, 20, 128)
    positions = np.arange(3000)
    whole = once.at(positions)
    for position in (0, 5, 130, 1023, 1024, 2999):
        for table, expected in zip(grown.at(np.array([position])), whole, strict=True):
            np.testing.assert_array_equal(table[0], expected[position])
    for table, expected in zip(grown.at(positions), whole, strict=True):
        np.testing.assert_array_equal(table, expected)


def test_partial_rotation_and_no_tokens() -> None:
    rotary = RotaryEmbedding(RopeSpec(rotary_dim=4), 16, 64)
    cos, sin = rotary.at(np.array([0, 1]))
    np.testing.assert_allclose(cos, np.cos([[0, 0], [1, 0.01]]), atol=1e-7)
    np.testing.assert_allclose(sin, np.sin([[0, 0], [1, 0.01]]), atol=1e-7)
    assert rotary.at(np.zeros(0, np.int32))[0].shape == (0, 2)
