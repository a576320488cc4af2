"""References: right against plain formulas, the same on torch, and each token's bits its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headrace import ops

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


def check_torch(function, arrays: list[np.ndarray], tolerance: float = 2e-6) -> np.ndarray:
    """function's result on numpy, after comparing it with its result on torch."""
    found = function(*(a.copy() for a in arrays))
    other = function(*(torch.from_numpy(a.copy()) for a in arrays))
    assert isinstance(other, torch.Tensor)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, other.numpy(), rtol=tolerance, atol=tolerance)
    return found


def check_invariant(function, tokens: int = 37) -> None:
    """function(indices) of some tokens equals those of all tokens, bit for bit, in any order and number."""
    whole = function(np.arange(tokens))
    rng = np.random.default_rng(1)
    for count in (1, 2, 3, 15, 16, 17, 33):
        chosen = rng.permutation(tokens)[:count]
        np.testing.assert_array_equal(function(chosen), whole[chosen])


def test_embedding() -> None:
    weight, ids = normal(11, 5), np.array([3, 0, 10, 3])
    found = ops.embedding(ids, weight)
    np.testing.assert_array_equal(found, weight[ids])
    np.testing.assert_array_equal(ops.embedding(torch.from_numpy(ids), torch.from_numpy(weight)).numpy(), found)
    out = np.empty((4, 5), np.float32)
    assert ops.embedding(ids, weight, out=out) is out
    np.testing.assert_array_equal(out, found)


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 40])
@pytest.mark.parametrize(("out_size", "in_size"), [(7, 12), (300, 64), (2500, 576)])
def test_linear(tokens: int, out_size: int, in_size: int) -> None:
    x, weight, bias = normal(tokens, in_size), normal(out_size, in_size), normal(out_size)
    found = check_torch(ops.linear, [x, weight, bias], tolerance=1e-4)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4)
    assert found.shape == (tokens, out_size) and found.flags.c_contiguous
    out = np.full((tokens, out_size), np.nan, np.float32)
    assert ops.linear(x, weight, bias, out=out) is out
    np.testing.assert_array_equal(out, found)


@pytest.mark.parametrize(
    ("out_size", "in_size"),
    [(1, 8), (2049, 512), (8, 8), (33, 24), (96, 64), (100, 48), (504, 512), (1152, 896), (3072, 576)],
)
def test_linear_is_invariant(out_size: int, in_size: int) -> None:
    x, weight, bias = normal(37, in_size), normal(out_size, in_size), normal(out_size)
    check_invariant(lambda chosen: ops.linear(x[chosen], weight, bias))
    wide = normal(37, in_size + 5)  # tokens that lie apart in memory
    wide[:, :in_size] = x
    np.testing.assert_array_equal(ops.linear(wide[:, :in_size], weight, bias), ops.linear(x, weight, bias))


def test_rms_norm() -> None:
    x, weight = normal(6, 33), normal(33)
    found = check_torch(lambda a, w: ops.rms_norm(a, w, 1e-5), [x, weight])
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6)
    assert ops.rms_norm(x, weight, 1e-5, out=x) is x
    np.testing.assert_array_equal(x, found)


def test_add_rms_norm_updates_the_residual() -> None:
    x, residual, weight = normal(6, 32), normal(6, 32), normal(32)
    total = x + residual
    normed, returned = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert returned is residual
    np.testing.assert_array_equal(residual, total)
    np.testing.assert_array_equal(normed, ops.rms_norm(total, weight, 1e-6))
    check_torch(lambda a, r, w: ops.add_rms_norm(a, r, w, 1e-6)[0], [x, total, weight])


@pytest.mark.parametrize("size", [8, 64, 576, 9001])
def test_rms_norm_is_invariant(size: int) -> None:
    x, residual, weight = normal(37, size), normal(37, size), normal(size)
    check_invariant(lambda chosen: ops.rms_norm(x[chosen], weight, 1e-5))
    check_invariant(lambda chosen: ops.add_rms_norm(x[chosen], residual[chosen].copy(), weight, 1e-5)[0])
    heads, weight = normal(37, 5, 12)[:, 1:4], normal(12)  # heads inside a merged projection
    check_invariant(lambda chosen: ops.rms_norm(heads[chosen], weight, 1e-5))
    np.testing.assert_array_equal(ops.rms_norm(heads, weight, 1e-5), ops.rms_norm(heads.copy(), weight, 1e-5))


@pytest.mark.parametrize(("dim", "rotary"), [(8, 8), (10, 6), (12, 2)])
def test_rope(dim: int, rotary: int) -> None:
    x, angles = normal(5, 3, dim), normal(5, rotary // 2)
    cos, sin = np.cos(angles), np.sin(angles)
    found = check_torch(ops.rope, [x, cos, sin])
    # as a complex product: dimension i is the real part, dimension i + rotary / 2 the imaginary one
    turned = (x[..., : rotary // 2] + 1j * x[..., rotary // 2 : rotary]) * np.exp(1j * angles)[:, None]
    expected = np.concatenate([turned.real, turned.imag, x[..., rotary:]], -1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    check_invariant(lambda chosen: ops.rope(x[chosen % 5], cos[chosen % 5], sin[chosen % 5]))
    assert ops.rope(x, cos, sin, out=x) is x
    np.testing.assert_array_equal(x, found)


EXACT = {
    "silu_mul": lambda g: g / (1 + math.exp(-g)),
    "gelu_mul": lambda g: g / 2 * (1 + math.erf(g / math.sqrt(2))),
    "gelu_tanh_mul": lambda g: g / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("size", [5, 64, 77])
def test_gated_activations(name: str, size: int) -> None:
    op, scale = getattr(ops, name), 6.0
    x = normal(37, 2 * size) * np.float32(scale)
    found = check_torch(op, [x], tolerance=1e-5)
    exact = np.vectorize(EXACT[name])(x[:, :size].astype(np.float64)) * x[:, size:]
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)
    check_invariant(lambda chosen: op(x[chosen]))
    out = np.empty_like(found)
    assert op(x, out=out) is out
    np.testing.assert_array_equal(out, found)


@pytest.mark.parametrize("name", EXACT)
def test_gated_activations_at_the_ends(name: str) -> None:
    gate = np.array([[-np.inf, -3e38, -1000, -88, 0, 88, 1000, np.nan]], np.float32)[:, 1:]
    with np.errstate(all="raise", under="ignore"):
        found = getattr(ops, name)(np.concatenate([gate[:, 1:], np.ones((1, 6), np.float32)], -1))[0]
    np.testing.assert_allclose(found[:5], [0, 0, 0, 88, 1000], atol=1e-30)
    assert np.isnan(found[5])


def test_kv_write() -> None:
    k, v = normal(4, 2, 3), normal(4, 2, 3)
    slots = np.array([5, -1, 0, 11], np.int32)
    for wrap in (lambda a: a, torch.from_numpy):
        keys, values = np.zeros((3, 4, 2, 3), np.float32), np.zeros((3, 4, 2, 3), np.float32)
        ops.kv_write(wrap(keys), wrap(values), wrap(k), wrap(v), wrap(slots))
        for pages, new in ((keys, k), (values, v)):
            flat = pages.reshape(12, 2, 3)
            np.testing.assert_array_equal(flat[[5, 0, 11]], new[[0, 2, 3]])
            assert not flat[[1, 2, 3, 4, 6, 7, 8, 9, 10]].any()
