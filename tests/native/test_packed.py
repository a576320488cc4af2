"""Packed weights: the file's own numbers, products right on odd sizes, a token's bits its own."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ops.native.library import library
from headrace.ops.native.packed import Arena, PackedMatrix, StoredTensor, pack, packed_linear, product, stored_float32
from native.blocks import FORMATS, GROUPED, dequantized, random_rows

ARENA = Arena()
ALL = [*FORMATS, "I8", *GROUPED]
QUANTISED = [format for format in ALL if format.startswith(("Q", "I"))]


def matrix(format: str, n: int, k: int, seed: int = 0, mode: str = "exact") -> tuple[PackedMatrix, np.ndarray]:
    """A packed matrix and its numbers, in an order that is not the file's."""
    rng = np.random.default_rng(seed)
    rows, order = random_rows(rng, format, n, k), rng.permutation(n)
    return pack([StoredTensor(format, rows, order)], k, ARENA, mode), dequantized(format, rows)[order]


def tokens(count: int, k: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, k), np.float32)


def bound(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """How far a float32 sum may be from the exact one: rounding of every step, as large as the terms allow."""
    return 2.0**-24 * (x.shape[1] + 2) * (np.abs(x).astype(np.float64) @ np.abs(weight).T.astype(np.float64)) + 1e-30


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize(("n", "k"), [(1, 256), (33, 512), (70, 1280)])
def test_holds_the_numbers_of_the_file(path: str, format: str, n: int, k: int) -> None:
    packed, exact = matrix(format, n, k)
    assert packed.shape == exact.shape and packed.size == exact.size
    np.testing.assert_array_equal(packed.dequantize(), exact)
    # a product with unit vectors picks weights out of the kernels' decoders, one at a time and many at once
    unit = np.eye(k, dtype=np.float32)
    np.testing.assert_array_equal(packed_linear(unit, packed).T, exact)
    np.testing.assert_array_equal(packed_linear(unit[k // 2 : k // 2 + 1], packed)[0], exact[:, k // 2])


@pytest.mark.parametrize("format", ALL)
def test_product_and_its_bits_in_any_company(path: str, format: str) -> None:
    n, k = 77, 768
    packed, exact = matrix(format, n, k)
    x, bias = tokens(45, k), tokens(1, n)[0]
    whole = packed_linear(x, packed, bias)
    assert whole.shape == (45, n) and whole.dtype == np.float32
    error = np.abs(whole - (x.astype(np.float64) @ exact.T.astype(np.float64) + bias))
    assert (error <= bound(x, exact) + 1e-6 * np.abs(bias)).all()
    for threads in (1, 2, 5):
        library().set_num_threads(threads)
        for count in range(1, 46):
            first = (7 * count) % (46 - count)
            part = packed_linear(x[first : first + count], packed, bias)
            np.testing.assert_array_equal(part, whole[first : first + count])


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("k", [32, 288, 320, 768, 1280])
def test_sixteen_bit_product_and_its_bits_in_any_company(path: str, format: str, k: int) -> None:
    if (k % 256 and format.endswith("_K")) or (k % 64 and format in GROUPED):
        pytest.skip("rows of whole super-blocks or groups only")
    if product("default", format, 1) == "bfloat16":
        pytest.skip("products in bfloat16: test_bf16_products.py")
    n = 77
    packed, exact = matrix(format, n, k, mode="default")
    x, bias = tokens(60, k), tokens(1, n)[0]
    x[:, ::7] *= 30  # outliers
    x[5] *= 1e20
    x[6] *= 1e-20
    x[7] = 0
    x[8, : k // 2] = 0
    whole = packed_linear(x, packed, bias)
    # a scale for 256 k: every input is off by at most half of 1 / 32767 of the largest of them
    padded = np.abs(np.pad(x, ((0, 0), (0, -k % 256)))).reshape(60, -1, 256)
    off = np.repeat(padded.max(-1, keepdims=True) / 32767 * 0.51, 256, -1).reshape(60, -1)[:, :k].astype(np.float64)
    error = np.abs(whole - (x.astype(np.float64) @ exact.T.astype(np.float64) + bias))
    assert (error <= off @ np.abs(exact).T.astype(np.float64) + 40 * bound(x, exact) + 1e-6 * np.abs(bias)).all()
    if product("default", format, 1) == "int16":
        assert not np.array_equal(whole, packed_linear(x, matrix(format, n, k)[0], bias))
    for threads in (1, 3):
        library().set_num_threads(threads)
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 24, 25, 26, 41, 60):
            first = (7 * count) % (61 - count)
            np.testing.assert_array_equal(packed_linear(x[first : first + count], packed, bias),
                                          whole[first : first + count])  # fmt: skip


@pytest.mark.parametrize("mode", ["default", "int8"])
def test_rounded_products_of_damaged_tokens(path: str, mode: str) -> None:
    packed, _ = matrix("Q4_K", 40, 512, mode=mode)
    x = tokens(30, 512)
    whole = packed_linear(x, packed)
    x[3, 300], x[11, 0], x[12, 511] = np.nan, np.inf, -np.inf
    found = packed_linear(x, packed)
    kept = [t for t in range(30) if t not in (3, 11, 12)]
    np.testing.assert_array_equal(found[kept], whole[kept])
    assert not np.isfinite(found[[3, 11, 12]]).any()


@pytest.mark.parametrize("format", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 3), (31, 48), (64, 257), (100, 33)])
def test_plain_formats_on_any_size(path: str, format: str, n: int, k: int) -> None:
    packed, exact = matrix(format, n, k)
    np.testing.assert_array_equal(packed.dequantize(), exact)
    x = tokens(14, k)
    whole = packed_linear(x, packed)
    assert (np.abs(whole - x.astype(np.float64) @ exact.T.astype(np.float64)) <= bound(x, exact)).all()
    for token in range(14):
        np.testing.assert_array_equal(packed_linear(x[token : token + 1], packed)[0], whole[token])


def test_more_tokens_than_one_pass_takes(path: str) -> None:
    packed, _ = matrix("Q4_1", 40, 512)
    x = tokens(1100, 512)
    whole = packed_linear(x, packed)
    for first in (0, 1020, 1024, 1099):
        np.testing.assert_array_equal(packed_linear(x[first : first + 1], packed)[0], whole[first])


def test_no_tokens(path: str) -> None:
    packed, _ = matrix("Q4_1", 40, 256)
    assert packed_linear(np.empty((0, 256), np.float32), packed).shape == (0, 40)
    assert packed.rows(np.empty(0, np.int32)).shape == (0, 256)


def test_tokens_apart_and_a_buffer_apart(path: str) -> None:
    packed, _ = matrix("Q5_1", 40, 256)
    wide = tokens(9, 600)
    expected = packed_linear(np.ascontiguousarray(wide[:, 100:356]), packed)
    out = np.full((9, 50), 7, np.float32)
    result = packed_linear(wide[:, 100:356], packed, out=out[:, 4:44])
    np.testing.assert_array_equal(result, expected)
    assert (out[:, :4] == 7).all() and (out[:, 44:] == 7).all()
    columns = np.asfortranarray(wide[:, 100:356])
    np.testing.assert_array_equal(packed_linear(columns, packed), expected)


def test_merged_parts_of_different_formats(path: str) -> None:
    rng = np.random.default_rng(3)
    formats = [("Q4_K", 50), ("Q4_K", 14), ("Q6_K", 14), ("F32", 3)]
    parts = [StoredTensor(format, random_rows(rng, format, n, 512), None) for format, n in formats]
    parts[1] = StoredTensor("Q4_K", parts[1].rows, rng.permutation(14))
    merged = pack(parts, 512, ARENA)
    assert [(s.format, s.outputs) for s in merged.segments] == [("Q4_K", 64), ("Q6_K", 14), ("F32", 3)]
    x, bias = tokens(20, 512), tokens(1, 81)[0]
    whole = packed_linear(x, merged, bias)
    start = 0
    for part in parts:
        n = len(part.rows)
        alone = packed_linear(x, pack([part], 512, ARENA), np.ascontiguousarray(bias[start : start + n]))
        np.testing.assert_array_equal(whole[:, start : start + n], alone)
        start += n
    ids = np.array([80, 0, 63, 64, 77, 78, 5])
    np.testing.assert_array_equal(merged.rows(ids), merged.dequantize()[ids])


def test_damaged_and_huge_tokens_stay_alone(path: str) -> None:
    packed, exact = matrix("Q4_0", 40, 256)
    x = tokens(20, 256)
    whole = packed_linear(x, packed)
    x[3, 7], x[11, 0], x[12] = np.nan, np.inf, 3e38
    found = packed_linear(x, packed)
    kept = [t for t in range(20) if t not in (3, 11, 12)]
    np.testing.assert_array_equal(found[kept], whole[kept])
    assert np.isnan(found[3]).all()
    assert not np.isfinite(found[11][exact[:, 0] != 0]).any()


def test_values_that_are_not_finite_are_refused(path: str) -> None:
    rng = np.random.default_rng(0)
    for format in FORMATS:
        rows = random_rows(rng, format, 40, 512)
        flat = rows[37].view(np.uint16)
        flat[105 - 1 if format == "Q6_K" else 0] = 0x7C00 if format not in ("F32", "BF16") else 0x7F80
        if format == "F32":
            rows[37].view(np.uint32)[0] = 0x7F800000
        with pytest.raises(ValueError, match="not finite"):
            pack([StoredTensor(format, rows, None)], 512, ARENA)


def test_float32_is_stored_as_small_as_it_can_be() -> None:
    values = np.array([[1.0, -0.5, 3e38], [0.0, 1e-30, 7.0]], np.float32)
    coarse = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert stored_float32(coarse).format == "BF16"
    assert stored_float32(np.array([[1.0, 1025 / 1024]], np.float32)).format == "F16"
    assert stored_float32(values).format == "F32"
    for each in (coarse, values, np.float32([[1 + 2**-10]])):
        np.testing.assert_array_equal(pack([stored_float32(each)], each.shape[1], ARENA).dequantize(), each)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(1, 140), st.integers(1, 5), st.integers(1, 30), st.integers(0, 10**6))
def test_any_shape(format: str, n: int, blocks: int, count: int, seed: int) -> None:
    k = 256 * blocks
    packed, exact = matrix(format, n, k, seed)
    x = tokens(count, k, seed)
    found = packed_linear.variants["native"](x, packed)
    assert (np.abs(found - x.astype(np.float64) @ exact.T.astype(np.float64)) <= bound(x, exact)).all()
    np.testing.assert_allclose(found, packed_linear.reference(x, packed), rtol=0, atol=2 * bound(x, exact).max())


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="needs Linux")
def test_large_pages_are_asked_for_where_the_system_gives_them() -> None:
    """Of private memory: shared memory has a switch of its own, which is off nearly everywhere."""
    piece = Arena().take(1 << 20)
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line):
            inside = int(match[1], 16) <= piece.ctypes.data < int(match[2], 16)
            permissions = match[3]
        elif inside and line.startswith("VmFlags:"):
            assert permissions.endswith("p") and "hg" in line.split()
            return
    pytest.fail("the arena's memory is not among the process's")
