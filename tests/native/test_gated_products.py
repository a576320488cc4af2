"""A product with its gated activation has the bits of the two one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from headrace import ops
from headrace.ops.native.library import library
from headrace.ops.native.packed import Arena, PackedMatrix, StoredTensor, pack, packed_gated, packed_linear
from headrace.ops.registry import Op
from native.blocks import random_rows

K = 288


def matrix(mode: str, *parts: tuple[str, int]) -> PackedMatrix:
    """Gate above up, each part (format, outputs) with rows of its own."""
    rng = np.random.default_rng(0)
    return pack([StoredTensor(format, random_rows(rng, format, n, K), None) for format, n in parts], K, Arena(), mode)


@pytest.mark.parametrize("mode", ["exact", "default", "int8"])
@pytest.mark.parametrize(
    "parts",
    [
        [("Q4_1", 160), ("Q4_1", 160)],
        [("Q4_0", 96), ("Q8_0", 96)],  # two segments
        [("Q8_0", 64), ("BF16", 128)],  # one of which holds parts of both halves
        [("Q4_1", 80), ("Q4_1", 80)],  # halves that are no whole panels
        [("Q4_0", 48), ("Q8_0", 48)],
    ],
)
def test_activation_of_a_product(path: str, mode: str, parts: list[tuple[str, int]]) -> None:
    packed = matrix(mode, *parts)
    outputs = packed.shape[0]
    rng = np.random.default_rng(1)
    bias = rng.standard_normal(outputs, np.float32)
    x = rng.standard_normal((300 if path != "amx-emulated" else 40, K), np.float32)
    for count in (1, 5, 33, len(x)):
        for use in (None, bias):
            expected = ops.silu_mul(packed_linear(x[:count], packed, use))
            for threads in (1, 3):
                library().set_num_threads(threads)
                np.testing.assert_array_equal(packed_gated(x[:count], packed, ops.silu_mul, use), expected)


@pytest.mark.parametrize("activation", [ops.silu_mul, ops.gelu_tanh_mul, ops.gelu_mul, ops.swiglu_clamped_mul])
def test_every_activation(path: str, activation: Op) -> None:
    packed = matrix("default", ("Q4_1", 64), ("Q4_1", 64))
    x = np.random.default_rng(2).standard_normal((7, K), np.float32)
    np.testing.assert_array_equal(packed_gated(x, packed, activation), activation(packed_linear(x, packed)))
    assert packed_gated(x[:0], packed, activation).shape == (0, 64)
