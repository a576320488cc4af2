"""Formats of the KV cache: what comes back, and how far it is from what went in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ops.kv_format import FLOAT32, KV_FORMATS


def test_float32_is_kept_as_it_is() -> None:
    x = np.float32([[1.5, np.nan, np.inf]])
    assert FLOAT32.unpack(FLOAT32.pack(x)) is x


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 3, 8, 64]), st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
def test_bfloat16_rounds_as_torch_does(seed: int, dim: int, size: float) -> None:
    x = (np.random.default_rng(seed).standard_normal((5, dim)) * size).astype(np.float32)
    expected = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    packed = KV_FORMATS["bfloat16"].pack(x)
    assert packed.shape == (5, KV_FORMATS["bfloat16"].vector_bytes(dim))
    np.testing.assert_array_equal(KV_FORMATS["bfloat16"].unpack(packed), expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 3, 8, 64]), st.sampled_from([1e-20, 1.0, 1e30]))
def test_int8_is_off_by_half_a_step_at_most(seed: int, dim: int, size: float) -> None:
    x = (np.random.default_rng(seed).standard_normal((5, dim)) * size).astype(np.float32)
    x[0] = 0
    back = KV_FORMATS["int8"].unpack(KV_FORMATS["int8"].pack(x))
    step = np.abs(x).max(-1, keepdims=True) / 127
    assert (np.abs(back - x) <= step * 0.501).all() and not back[0].any()


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_damage_stays_visible(name: str, value: float) -> None:
    x = np.ones((2, 8), np.float32)
    x[1, 3] = value
    back = KV_FORMATS[name].unpack(KV_FORMATS[name].pack(x))
    assert np.isfinite(back[0]).all() and not np.isfinite(back[1, 3])
