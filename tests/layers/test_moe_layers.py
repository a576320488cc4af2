"""Experts in each layout they are stored in, what is missing from them, and the norm that is none."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.layers.moe import ExpertLayout, ExpertNames, MixtureOfExperts
from headrace.layers.norm import NoNorm, RMSNorm
from headrace.layers.weights import WeightsError, WeightSource
from headrace.models.spec import ModelSpec, MoESpec
from headrace.quant.unquantized import Unquantized
from models.harness import DictCheckpoint

NUM, HIDDEN, INNER = 3, 8, 5
RNG = np.random.default_rng(0)
GATE, UP = (RNG.standard_normal((NUM, INNER, HIDDEN), np.float32) for _ in range(2))
DOWN = RNG.standard_normal((NUM, HIDDEN, INNER), np.float32)
ROUTER = RNG.standard_normal((NUM, HIDDEN), np.float32)
BOTH = np.concatenate([GATE, UP], axis=1)
TURNS = np.stack([GATE, UP], axis=2).reshape(NUM, 2 * INNER, HIDDEN)  # gate and up in turns
NAMES = ExpertNames(gate="w1", up="w3", down="w2")

LAYOUTS = {
    "one by one": {
        f"m.experts.{e}.{name}.weight": values[e]
        for name, values in (("w1", GATE), ("w3", UP), ("w2", DOWN))
        for e in range(NUM)
    },
    "merged": {"m.experts.gate_up_proj": BOTH, "m.experts.down_proj": DOWN},
    "stacked": {
        "m.experts.gate_proj.weight": GATE,
        "m.experts.up_proj.weight": UP,
        "m.experts.down_proj.weight": DOWN,
    },
    "in_out": {"m.experts.gate_up_proj": TURNS.swapaxes(1, 2), "m.experts.down_proj": DOWN.swapaxes(1, 2)},
}


def spec(experts_per_token: int = 2) -> ModelSpec:
    moe = MoESpec(NUM, experts_per_token, INNER)
    return ModelSpec("mixtral", 50, HIDDEN, 32, 1, 2, 2, 4, 1e-5, 64, moe=moe)


def build(tensors: dict[str, np.ndarray], layout: ExpertLayout = ExpertLayout.OUT_IN) -> MixtureOfExperts:
    source = WeightSource(DictCheckpoint({"m.gate.weight": ROUTER, **tensors}))
    block = MixtureOfExperts(spec(), source, "m", Unquantized(), NAMES, layout)
    source.finish()
    return block


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_experts(name: str) -> None:
    block = build(LAYOUTS[name], ExpertLayout.IN_OUT if name == "in_out" else ExpertLayout.OUT_IN)
    np.testing.assert_array_equal(block.experts.gate_up, BOTH)
    np.testing.assert_array_equal(block.experts.down, DOWN)
    assert block.experts.gate_up.flags.c_contiguous and block.experts.down.flags.c_contiguous
    assert block.num_parameters == ROUTER.size + BOTH.size + DOWN.size
    assert block.weight_bytes == 4 * block.num_parameters
    x = RNG.standard_normal((4, HIDDEN), np.float32)
    np.testing.assert_array_equal(block(x), build(LAYOUTS["merged"])(x))


def test_missing_experts_are_named() -> None:
    tensors = {name: values for name, values in LAYOUTS["one by one"].items() if ".1.w3" not in name}
    with pytest.raises(WeightsError, match=r"missing: m.experts.1.w3.weight \[5, 8\]"):
        build(tensors)
    with pytest.raises(ValueError, match="4 of 3 experts"):
        spec(experts_per_token=4)


def test_no_norm_only_sums() -> None:
    x, residual = RNG.standard_normal((2, 3, HIDDEN), np.float32)
    assert NoNorm()(x) is x and NoNorm().num_parameters == 0
    expected = residual + x
    normed, total = NoNorm().add(x, residual)
    assert normed is total is residual
    np.testing.assert_array_equal(total, expected)


def test_a_norm_stored_less_one() -> None:
    stored = RNG.standard_normal(HIDDEN).astype(np.float32)
    source = WeightSource(DictCheckpoint({"plain": stored + 1, "gemma": stored}))
    x = RNG.standard_normal((3, HIDDEN), np.float32)
    plain, gemma = RMSNorm(source, "plain", HIDDEN, 1e-6), RMSNorm(source, "gemma", HIDDEN, 1e-6, offset=1.0)
    np.testing.assert_array_equal(gemma(x), plain(x))
