"""Merged linear layers: shard order, biases, counts, and what is left to the scheme."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.layers.linear import Linear, MergedLinear, Shard, Split
from headrace.layers.weights import WeightsError, WeightSource
from headrace.quant.unquantized import Unquantized
from models.harness import DictCheckpoint

RNG = np.random.default_rng(0)


def tensors() -> dict[str, np.ndarray]:
    shapes = {"q.weight": (6, 4), "q.bias": (6,), "k.weight": (2, 4), "v.weight": (2, 4), "v.bias": (2,)}
    return {name: RNG.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def test_shards_lie_side_by_side_and_only_some_have_biases() -> None:
    checkpoint = tensors()
    source = WeightSource(DictCheckpoint(checkpoint))
    layer = MergedLinear(source, [Shard("q", 6, True), Shard("k", 2), Shard("v", 2, True)], 4, Unquantized())
    source.finish()
    x = RNG.standard_normal((3, 4), np.float32)
    expected = [x @ checkpoint["q.weight"].T + checkpoint["q.bias"], x @ checkpoint["k.weight"].T]
    expected.append(x @ checkpoint["v.weight"].T + checkpoint["v.bias"])
    np.testing.assert_allclose(layer(x), np.concatenate(expected, -1), rtol=1e-5, atol=1e-6)
    assert layer.num_parameters == 10 * 4 + 8
    assert layer.weight_bytes == 4 * (10 * 4 + 10)
    assert layer.split is Split.COLUMN and layer.input_quant is None


def test_a_single_matrix_is_used_as_it_is() -> None:
    checkpoint = tensors()
    layer = Linear(WeightSource(DictCheckpoint(checkpoint)), Shard("q", 6), 4, Unquantized())
    assert layer.weights is checkpoint["q.weight"]
    assert layer.bias is None


def test_missing_parts_are_named_at_the_end() -> None:
    source = WeightSource(DictCheckpoint(tensors()))
    MergedLinear(source, [Shard("q", 6, True), Shard("k", 3, True), Shard("v", 2, True)], 4, Unquantized())
    with pytest.raises(WeightsError, match=r"missing: k.bias \[3\].*k.weight: \[2, 4\] in the file, \[3, 4\]"):
        source.finish()
