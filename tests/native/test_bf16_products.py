"""Products in bfloat16 on tiles: the very bits that the instruction's definition gives, emulated or on AMX itself."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.ops.native.library import library
from headrace.ops.native.packed import Arena, StoredTensor, pack, packed_linear, product
from native.blocks import FORMATS, GROUPED, dequantized, random_rows

ARENA = Arena()
ROUNDED = [format for format in [*FORMATS, "I8", *GROUPED] if format != "F32"]  # F32 matrices are multiplied in float32


@pytest.fixture
def tiles(path: str) -> str:
    if not path.startswith("amx"):
        pytest.skip("a path without tiles")
    return path


def bf16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16: to nearest, ties to even, denormals to zero."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    rounded = np.where(np.isnan(values), np.float32(np.nan), rounded)
    return np.where(np.abs(values) < 2.0**-126, np.float32(0), rounded)


HALF = ("Q4_0", "Q4_1", "Q4_64", "Q8_0", "Q8_64")  # decoded in fp16
ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # of each 8 k


def through_half(weight: np.ndarray) -> np.ndarray:
    """float32 rounded to fp16, then to bfloat16 (halves away from zero) 2^112 smaller; denormals of fp16 to zero."""
    with np.errstate(over="ignore"):
        bits = weight.astype(np.float16).view(np.int16)
    up = ((bits + np.int16(4)) >> 3 & np.int16(-0x7001)).astype(np.uint16).astype(np.uint32) << 16
    values = up.view(np.float32)
    return np.where(np.abs(values) < 2.0**-126, np.float32(0), values)


def by_definition(x: np.ndarray, weight: np.ndarray, format: str) -> np.ndarray:
    """x [T, K] times weight [N, K] transposed as TDPBF16PS sums (Intel's manual, volume 2): for each 32 k one chain
    over the even and one over the odd ones, then both together, then to the sum so far. A product of two bfloat16 is
    exact in float32, so that adding it rounds as a fused multiply-add does, while nothing underflows."""
    extra = -x.shape[1] % 32
    x = bf16(x * np.float32(2.0**64))
    weight = through_half(weight) if format in HALF else bf16(weight)
    x, weight = (np.pad(each, ((0, 0), (0, extra))) for each in (x, weight))
    order = (np.arange(0, x.shape[1], 8)[:, None] + ORDER).ravel()
    x, weight = x[:, order], weight[:, order]
    total = np.zeros((len(x), len(weight)), np.float32)
    for start in range(0, x.shape[1], 32):
        even, odd = np.zeros_like(total), np.zeros_like(total)
        for k in range(start, start + 32, 2):
            even += x[:, k, None] * weight[None, :, k]
            odd += x[:, k + 1, None] * weight[None, :, k + 1]
        total += even + odd
    return total * np.float32(2.0**48 if format in HALF else 2.0**-64)


def inputs(count: int, k: int) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((count, k), np.float32)
    x[:, ::7] *= 30
    x[5 % count] *= 1e10
    x[6 % count] *= 1e-10
    return x


@pytest.mark.parametrize("format", ROUNDED)
@pytest.mark.parametrize(("n", "k"), [(1, 256), (77, 768), (40, 1280)])
def test_the_bits_of_the_definition_in_any_company(tiles: str, format: str, n: int, k: int) -> None:
    rows = random_rows(np.random.default_rng(0), format, n, k)
    packed = pack([StoredTensor(format, rows, None)], k, ARENA, "default")
    assert product("default", format, 1) == "bfloat16"
    x = inputs(70, k)
    expected = by_definition(x, dequantized(format, rows), format)
    whole = packed_linear(x, packed)
    np.testing.assert_array_equal(whole, expected)
    for threads in (1, 3):
        library().set_num_threads(threads)
        for count in (1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65):
            first = (7 * count) % (71 - count)
            np.testing.assert_array_equal(packed_linear(x[first : first + count], packed), whole[first : first + count])


@pytest.mark.parametrize("format", ["F16", "BF16"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 3), (31, 48), (64, 257), (100, 33)])
def test_plain_formats_on_any_size(tiles: str, format: str, n: int, k: int) -> None:
    rows = random_rows(np.random.default_rng(0), format, n, k)
    packed = pack([StoredTensor(format, rows, None)], k, ARENA, "default")
    x, bias = inputs(37, k), inputs(1, n)[0]
    expected = by_definition(x, dequantized(format, rows), format) + bias
    for count in (1, 20, 37):
        np.testing.assert_array_equal(packed_linear(x[:count], packed, bias), expected[:count])


@pytest.mark.parametrize("k", [256, 512, 5120])  # inputs that fit the cache together, and such that go in two and nine
def test_more_tokens_than_one_pass_takes(tiles: str, k: int) -> None:
    rows = random_rows(np.random.default_rng(0), "Q4_1", 40, k)
    packed = pack([StoredTensor("Q4_1", rows, None)], k, ARENA, "default")
    x = inputs(1100, k)
    whole = packed_linear(x, packed)
    for first, count in ((0, 1), (1020, 8), (1024, 20), (1099, 1)):
        np.testing.assert_array_equal(packed_linear(x[first : first + count], packed), whole[first : first + count])


def test_what_the_tiles_take_for_zero(tiles: str) -> None:
    """Denormal weights; products and sums that are denormal in the tiles' scale."""
    weight = np.zeros((3, 64), np.float32)
    weight[0, 0], weight[1, 1], weight[2, :2] = 2.0**-120, 2.0**-130, 1.0
    bits = np.ascontiguousarray((weight.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    packed = pack([StoredTensor("BF16", bits, None)], 64, ARENA, "default")
    x = np.zeros((3, 64), np.float32)
    x[0, :2] = 1.0, 2.0**20
    x[1, :2] = 2.0**-71, 0.0  # with 2^-120 and 2^64 the product is denormal
    x[2, :2] = 2.0**-70, -(2.0**-149)  # it is the smallest normal one; a denormal input is one that counts
    found = packed_linear(x, packed)
    np.testing.assert_array_equal(found[0], np.float32([2.0**-120, 0, 1 + 2.0**20]))
    np.testing.assert_array_equal(found[1], np.float32([0, 0, 2.0**-71]))
    np.testing.assert_array_equal(found[2], np.float32([0, 0, 2.0**-70]))


def test_fp16_keeps_what_bfloat16_does(tiles: str) -> None:
    """Rounding to fp16 first costs next to nothing: every product is within bfloat16's rounding of the exact one."""
    for format in HALF:
        rows = random_rows(np.random.default_rng(0), format, 64, 512, std=0.02)
        packed = pack([StoredTensor(format, rows, None)], 512, ARENA, "default")
        weight = dequantized(format, rows)
        found = packed_linear(np.eye(512, dtype=np.float32), packed).T
        small = 2.0**-14  # of fp16, under which numbers are denormal
        assert (
            np.abs(found - weight) <= np.abs(weight) * (2.0**-8 + 2.0**-11) + (np.abs(weight) < small) * small
        ).all()


@pytest.mark.parametrize("format", HALF)
def test_scales_that_are_denormal_in_fp16(tiles: str, format: str) -> None:
    rows = random_rows(np.random.default_rng(0), format, 40, 512, std=1e-5)
    packed = pack([StoredTensor(format, rows, None)], 512, ARENA, "default")
    x = inputs(20, 512)
    whole = packed_linear(x, packed)
    np.testing.assert_array_equal(whole, by_definition(x, dequantized(format, rows), format))
    np.testing.assert_array_equal(packed_linear(x[:2], packed), whole[:2])


def test_damaged_and_huge_tokens_stay_alone(tiles: str) -> None:
    rows = random_rows(np.random.default_rng(0), "Q4_K", 40, 512)
    packed = pack([StoredTensor("Q4_K", rows, None)], 512, ARENA, "default")
    x = inputs(40, 512)
    whole = packed_linear(x, packed)
    x[3, 300], x[11, 0], x[12, 511], x[13] = np.nan, np.inf, -np.inf, 3e38
    found = packed_linear(x, packed)
    kept = [t for t in range(40) if t not in (3, 11, 12, 13)]
    np.testing.assert_array_equal(found[kept], whole[kept])
    assert np.isnan(found[3]).all() and not np.isfinite(found[[11, 12]]).any()


def test_numbers_of_each_mode(path: str) -> None:
    """Which paths round what, as docs/cpu.md says."""
    amx, integers = path.startswith("amx"), path != "portable"
    for tokens in (1, 4, 5, 100):
        for format in ("Q4_1", "BF16", "F32"):
            assert product("exact", format, tokens) == "float32"
            expected = "int16" if format == "Q4_1" and integers else "float32"
            if amx and format != "F32":
                few = format == "Q4_1" and tokens <= 4
                assert product("default", format, tokens) == "bfloat16"
                assert product("fast", format, tokens) == ("int16" if few else "bfloat16")
            else:
                assert product("default", format, tokens) == product("fast", format, tokens) == expected


def test_fast_mode_takes_each_product_as_it_says(tiles: str) -> None:
    rows = random_rows(np.random.default_rng(0), "Q4_1", 77, 768)
    made = {mode: pack([StoredTensor("Q4_1", rows, None)], 768, ARENA, mode) for mode in ("default", "fast")}
    x = inputs(40, 768)
    np.testing.assert_array_equal(packed_linear(x, made["fast"]), packed_linear(x, made["default"]))
    few = packed_linear(x[:4], made["fast"])
    assert not np.array_equal(few, packed_linear(x[:4], made["default"]))
    exact = x[:4].astype(np.float64) @ dequantized("Q4_1", rows).T.astype(np.float64)
    scale = np.abs(exact).max(-1, keepdims=True)
    assert (np.abs(few - exact) < 1e-3 * scale).all()
    for token in range(4):
        np.testing.assert_array_equal(packed_linear(x[token : token + 1], made["fast"])[0], few[token])


def test_decoding_in_fp16_rounds_once(tiles: str) -> None:
    """Scales and minima of any size: also where float32 could not hold q * d + m."""
    rng = np.random.default_rng(0)
    rows, k = 96, 2048
    data = rng.integers(0, 256, (rows, k // 32, 20), dtype=np.uint8)
    parts = (rng.standard_normal((2, rows, k // 32)) * 2.0 ** rng.integers(-22, 11, (2, rows, k // 32))).astype(
        np.float16
    )
    for place, part in enumerate(parts):
        data[:, :, 2 * place : 2 * place + 2] = part[:, :, None].view(np.uint8)
    packed = pack([StoredTensor("Q4_1", data.reshape(rows, -1), None)], k, ARENA, "default")
    found = packed_linear(np.eye(k, dtype=np.float32), packed).T
    q = np.concatenate([data[:, :, 4:] & 15, data[:, :, 4:] >> 4], -1).astype(np.float64)
    d, m = parts.astype(np.float64)[..., None]
    exact = (q * d + m).reshape(rows, k)
    assert (exact.astype(np.float32) != exact).any()
    np.testing.assert_array_equal(found, through_half(exact) * np.float32(2.0**112))
