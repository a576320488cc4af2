"""Native norms, rotation and activations against their references."""

from __future__ import annotations

import numpy as np
import pytest

from headrace import ops

SIZES = [1, 3, 8, 15, 16, 17, 64, 100, 577]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(path: str, size: int) -> None:
    wide, weight = normal(9, 3, size + 5), normal(size, seed=1)
    x = wide[:, :, 2 : 2 + size]
    expected = ops.rms_norm.reference(x, weight, 1e-5)
    np.testing.assert_allclose(ops.rms_norm(x, weight, 1e-5), expected, rtol=3e-6, atol=1e-6)
    flat = np.ascontiguousarray(x[:, 1])
    alone = ops.rms_norm(flat, weight, 1e-5)
    np.testing.assert_array_equal(ops.rms_norm(x, weight, 1e-5)[:, 1], alone)
    assert ops.rms_norm(flat, weight, 1e-5, out=flat) is flat
    np.testing.assert_array_equal(flat, alone)
    before = wide.copy()
    ops.rms_norm(x, weight, 1e-5, out=x)  # in place, between neighbours that stay
    np.testing.assert_array_equal(wide[:, :, :2], before[:, :, :2])
    np.testing.assert_array_equal(wide[:, :, 2 + size :], before[:, :, 2 + size :])
    np.testing.assert_allclose(x, expected, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", [0, 1, 7, 200])
def test_add_rms_norm(path: str, size: int, tokens: int) -> None:
    x, residual, weight = normal(tokens, size), normal(tokens, size, seed=1), normal(size, seed=2)
    expected, total = ops.add_rms_norm.reference(x, residual.copy(), weight, 1e-5)
    found, same = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert same is residual
    np.testing.assert_array_equal(residual, total)
    np.testing.assert_allclose(found, expected, rtol=3e-6, atol=1e-6)
    for token in range(0, tokens, 50):
        one, _ = ops.add_rms_norm(
            x[token : token + 1], normal(tokens, size, seed=1)[token : token + 1].copy(), weight, 1e-5
        )
        np.testing.assert_array_equal(one[0], found[token])


@pytest.mark.parametrize(("dim", "half"), [(2, 1), (12, 6), (64, 32), (80, 16), (128, 64), (34, 17)])
def test_rope(path: str, dim: int, half: int) -> None:
    wide = normal(300, 7 * dim)
    x = wide[:, dim : 5 * dim].reshape(300, 4, dim)
    cos, sin = normal(300, half, seed=1), normal(300, half, seed=2)
    expected = ops.rope.reference(x, cos, sin)
    np.testing.assert_allclose(ops.rope(x, cos, sin), expected, rtol=0, atol=2e-6)
    before = wide.copy()
    assert ops.rope(x, cos, sin, out=x) is x
    np.testing.assert_allclose(x, expected, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(wide[:, :dim], before[:, :dim])
    np.testing.assert_array_equal(wide[:, 5 * dim :], before[:, 5 * dim :])


@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul", "gelu_mul", "swiglu_clamped_mul"])
@pytest.mark.parametrize("half", [1, 5, 16, 33, 640])
def test_activations(path: str, name: str, half: int) -> None:
    op = getattr(ops, name)
    x = normal(11, 2 * half) * 4
    expected = op.reference(x)
    # the reference's tanh form cancels for negative gates: an error of some 1e-7 of gate * up
    np.testing.assert_allclose(op(x), expected, rtol=3e-6, atol=2e-5 if name == "gelu_tanh_mul" else 2e-6)
    out = np.empty_like(expected)
    assert op(x, out=out) is out
    np.testing.assert_array_equal(out[5:6], op(x[5:6]))
    steep = np.array([0, -0.0, 90, -90, 200, -1e4, 1e30, -1e30, 1e-30, np.nan], np.float32)
    ends = np.concatenate([steep, np.ones_like(steep)])[None]
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_allclose(op(ends), op.reference(ends), rtol=3e-6, atol=1e-30 if name == "silu_mul" else 1e-5)


@pytest.mark.parametrize("size", [1, 16, 33, 640])
def test_elementwise(path: str, size: int) -> None:
    x, y = normal(300, size + 3)[:, 2 : 2 + size], normal(300, size, seed=1)
    x[0], x[1, 0], x[2, 0] = 1e30, np.nan, -np.inf
    np.testing.assert_array_equal(ops.scale(x, 0.1), ops.scale.reference(x, np.float32(0.1)))
    np.testing.assert_array_equal(ops.add(x, y), ops.add.reference(x, y))
    np.testing.assert_allclose(ops.soft_cap(x, 30.0), ops.soft_cap.reference(x, 30.0), rtol=0, atol=5e-6)
    expected = ops.add.reference(x, y)
    assert ops.add(y, x, out=y) is y
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(ops.scale(x[5:6], 3.0), ops.scale(x, 3.0)[5:6])
    assert ops.scale(x[:0], 2.0).shape == (0, size)


def test_damaged_tokens_stay_alone(path: str) -> None:
    x, residual, weight = normal(40, 100), normal(40, 100, seed=1), normal(100, seed=2)
    whole = ops.rms_norm(x, weight, 1e-5)
    x[7, 3], x[8] = np.nan, 1e25
    found = ops.rms_norm(x, weight, 1e-5)
    kept = [t for t in range(40) if t not in (7, 8)]
    np.testing.assert_array_equal(found[kept], whole[kept])
    assert np.isnan(found[7]).all()
    added, _ = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert np.isnan(added[7]).all() and np.isfinite(added[kept]).all()


def test_other_types_go_to_the_reference(path: str) -> None:
    x, weight = normal(4, 6).astype(np.float64), normal(6).astype(np.float64)
    np.testing.assert_array_equal(ops.rms_norm(x, weight, 1e-5), ops.rms_norm.reference(x, weight, 1e-5))
    np.testing.assert_array_equal(ops.silu_mul(x), ops.silu_mul.reference(x))


@pytest.mark.parametrize(("first", "count"), [(0, 1), (3, 6), (1, 257), (0, 9000), (40, 49152)])
def test_noise_has_the_bits_of_the_reference(path: str, first: int, count: int) -> None:
    ids = np.arange(first, first + count, dtype=np.int64)
    positions, choices = np.array([0, 5, 8191, 2**31 - 1]), np.array([0, 1, 127, 3])
    seeds = np.array([0, -1, 2**63 - 1, -(2**40)], np.int64)
    found = ops.gumbel_noise(ids, positions, seeds, choices)
    np.testing.assert_array_equal(found, ops.gumbel_noise.reference(ids, positions, seeds, choices))
    pairs = np.stack([ids, ids, ids[::-1], ids])
    np.testing.assert_array_equal(
        ops.gumbel_noise(pairs, positions, seeds, choices), ops.gumbel_noise.reference(pairs, positions, seeds, choices)
    )
