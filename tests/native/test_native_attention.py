"""The native backend against softmax in float64 and the reference, and its bits in every company."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.test_reference import LAYER, LENGTH, SINKS, VARIANTS, World
from headrace.attention.base import LayerAttention
from headrace.attention.native import NativeAttention
from headrace.attention.reference import ReferenceAttention
from headrace.core.kv_layout import KVGroup
from headrace.ops.kv_format import KV_FORMATS
from headrace.ops.native.library import library
from models.harness import make_batch

WIDE = LayerAttention(scale=0.125, num_heads=9, num_kv_heads=3, head_dim=64)
MORE = {
    **VARIANTS,
    "wide": WIDE,
    "wide-all": replace(WIDE, window=70, soft_cap=2.0, sinks=np.arange(9, dtype=np.float32) - 4),
    "large-head": replace(WIDE, num_heads=4, num_kv_heads=2, head_dim=128),
    "many-heads": replace(WIDE, num_heads=60, num_kv_heads=1, head_dim=17),
}


def native_world(layer: LayerAttention, **options: Any) -> World:
    return World(layer, backend=NativeAttention, **options)


@pytest.mark.parametrize("name", MORE)
def test_equals_softmax_and_no_company_changes_a_bit(path: str, name: str) -> None:
    layer = MORE[name]
    whole = native_world(layer).run({0: LENGTH})[0]
    np.testing.assert_allclose(whole, World(layer).exact(0), rtol=2e-5, atol=2e-5)
    for block_size, shuffle, threads in ((16, False, 1), (4, True, 2), (64, True, 3), (128, True, 2), (24, True, 2)):
        library().set_num_threads(threads)
        world = native_world(layer, block_size=block_size, seed=3, shuffle=shuffle)
        parts = [
            world.run({1: 130, 0: 3, 2: 64})[0],
            world.run({0: 127, 1: 1})[0],
            world.run({2: 1, 1: 1, 0: 1}, padding=2)[0],
            world.run({0: 1, 2: 70})[0],
            world.run({0: 5, 1: 1, 2: 5})[0],
            world.run({1: 77, 0: LENGTH - 137})[0],
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("name", MORE)
def test_agrees_with_the_reference_in_a_mixed_step(path: str, name: str) -> None:
    ours, theirs = native_world(MORE[name]), World(MORE[name])
    for spans in ({0: 100, 1: 70, 2: 1}, {2: 1, 1: 1, 0: 1}, {1: 30, 2: 3}):
        found, expected = ours.run(spans), theirs.run(spans)
        for row in spans:
            np.testing.assert_allclose(found[row], expected[row], rtol=2e-5, atol=2e-5)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_cut_gives_the_same_bits(data: st.DataObject) -> None:
    layer = MORE[data.draw(st.sampled_from(["plain", "window", "all", "wide-all"]))]
    whole = native_world(layer).run({0: LENGTH})[0]
    block_size = data.draw(st.sampled_from([1, 8, 16, 32, 48]))
    world = native_world(layer, block_size=block_size, seed=data.draw(st.integers(0, 9)))
    parts = []
    while world.lengths[0] < LENGTH:
        spans = {
            row: data.draw(st.integers(1, LENGTH - world.lengths[row]))
            for row in data.draw(st.permutations(range(3)))
            if world.lengths[row] < LENGTH and (row == 0 or data.draw(st.booleans()))
        }
        parts.append(world.run(spans)[0])
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_blocks_before_the_window_are_not_read(path: str) -> None:
    layer = MORE["window"]
    whole = native_world(layer).run({0: LENGTH})[0]
    world = native_world(layer)
    world.run({0: LENGTH - 1})
    assert layer.window is not None
    first_kept = (LENGTH - layer.window) // world.block_size
    for pages in world.cache:
        pages[world.tables[0][:first_kept]] = np.nan
    world.tables[0][:first_kept] = 0
    np.testing.assert_array_equal(world.run({0: 1})[0], whole[-1:])


@pytest.mark.parametrize("size", [3e4, 1e18])
def test_huge_scores(path: str, size: float) -> None:
    """One position takes everything; beyond float32's range the result is NaN for the reference, too."""
    world, other = native_world(WIDE), World(WIDE)
    for each in (world, other):
        each.qkv = [each.qkv[0] * np.float32(size), each.qkv[1], each.qkv[2]]
    with np.errstate(all="ignore"):
        found, expected = world.run({0: 150})[0], other.run({0: 150})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_a_damaged_query_and_a_damaged_neighbour_stay_alone(path: str) -> None:
    whole = native_world(WIDE)
    expected = {**whole.run({0: 100, 1: 100}), 2: whole.run({2: 3})[2]}
    world = native_world(WIDE)
    world.qkv[0][0, 50, 3] = np.nan  # a query
    for each in world.qkv[1:]:
        each[1, 40] = np.nan  # keys and values of another row
    found = world.run({0: 100, 1: 100})
    kept = np.arange(100) != 50
    np.testing.assert_array_equal(found[0][kept], expected[0][kept])
    assert np.isnan(found[0][50]).any()
    assert np.isnan(found[1][40:]).all()
    np.testing.assert_array_equal(world.run({2: 3})[2], expected[2])


def test_refuses_what_it_was_not_planned_for() -> None:
    world = native_world(VARIANTS["window"])
    world.layer = VARIANTS["plain"]
    with pytest.raises(ValueError, match="layer has window None, its KV group 50"):
        world.run({0: 3})
    assert SINKS.shape == (6,)


class PackedWorld(World):
    """A world whose cache holds keys and values in another format."""

    def __init__(self, kv_format: str, layer: LayerAttention, **options: Any):
        super().__init__(layer, **options)
        self.backend.kv_format = kv_format
        pages = [KV_FORMATS[kv_format].pages(page.shape) for page in self.cache]
        for page in pages:
            page[:] = 255  # NaN in bfloat16 and in scales
        self.cache = (pages[0], pages[1])


def tolerance(path: str, kv_format: str) -> dict[str, float]:
    """How far a code path may be from the reference: tiles round queries and weights to bfloat16."""
    rough = path.startswith("amx") and kv_format == "bfloat16"
    return {"rtol": 1e-2, "atol": 1e-2} if rough else {"rtol": 2e-5, "atol": 2e-5}


@pytest.mark.parametrize("kv_format", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["plain", "all", "mqa-odd", "wide-all", "large-head", "many-heads"])
def test_packed_pages_agree_with_the_reference_in_every_company(path: str, name: str, kv_format: str) -> None:
    layer = MORE[name]
    expected = PackedWorld(kv_format, layer).run({0: LENGTH})[0]
    whole = PackedWorld(kv_format, layer, backend=NativeAttention).run({0: LENGTH})[0]
    np.testing.assert_allclose(whole, expected, **tolerance(path, kv_format))
    assert np.abs(whole - expected).mean() < 1e-3
    exact = World(layer).exact(0)
    assert 0 < np.abs(whole - exact).max() < {"bfloat16": 0.03, "int8": 0.06}[kv_format] * np.abs(exact).max()
    for block_size, threads in ((4, 2), (64, 1), (24, 3), (128, 2)):
        library().set_num_threads(threads)
        world = PackedWorld(kv_format, layer, block_size=block_size, backend=NativeAttention)
        parts = [world.run({1: 20, 0: 3})[0], world.run({0: 127, 1: 1})[0], world.run({0: LENGTH - 130})[0]]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("kv_format", list(KV_FORMATS))
def test_a_damaged_vector_stays_damaged(path: str, kv_format: str) -> None:
    for value in (np.nan, np.inf):
        world = PackedWorld(kv_format, LAYER, backend=NativeAttention)
        world.qkv[2][0, 5, 3] = value
        assert np.isfinite(world.run({0: 5})[0]).all()
        found = world.run({0: 35})[0].reshape(35, 6, 8)
        assert not np.isfinite(found[:, :3, 3]).any()
        assert np.isfinite(found[:, 3:]).all()  # the other key/value head


@pytest.mark.parametrize("kv_format", ["float32", "bfloat16"])
@pytest.mark.parametrize("layer", [WIDE, replace(WIDE, window=700, soft_cap=3.0, sinks=np.arange(9, dtype=np.float32))])
def test_one_long_row_is_the_same_on_any_number_of_threads(path: str, layer: LayerAttention, kv_format: str) -> None:
    length = 1100  # five chunks
    rng = np.random.default_rng(1)
    qkv = [rng.standard_normal((length, n * 64), np.float32) for n in (9, 3, 3)]
    table = rng.permutation(80)[: -(-length // 16)]
    found = {}
    for threads, spans in ((1, [length]), (4, [length - 1, 1]), (3, [250, 6, 500, 343, 1])):
        library().set_num_threads(threads)
        backend, start, outs = NativeAttention(16), 0, []
        backend.kv_format = kv_format
        cache = tuple(KV_FORMATS[kv_format].pages((80, 16, 3, 64)) for _ in range(2))
        for page in cache:
            page[:] = np.nan if kv_format == "float32" else 255  # NaN in bfloat16
        for count in spans:
            part = slice(start, start + count)
            batch = make_batch([np.arange(start, start + count)], [[table]], 16)
            meta = backend.plan(batch, 0, KVGroup((0,), 3, 64, layer.window))
            outs.append(backend.run(*(x[part] for x in qkv), cache, meta, layer))
            start += count
        found[threads] = np.concatenate(outs)
    np.testing.assert_array_equal(found[4], found[1])
    np.testing.assert_array_equal(found[3], found[1])
    reference = ReferenceAttention(16)
    reference.kv_format = kv_format
    cache = tuple(KV_FORMATS[kv_format].pages((80, 16, 3, 64)) for _ in range(2))
    batch = make_batch([np.arange(length)], [[table]], 16)
    meta = reference.plan(batch, 0, KVGroup((0,), 3, 64, layer.window))
    expected = reference.run(*qkv, cache, meta, layer)
    np.testing.assert_allclose(found[1], expected, **tolerance(path, kv_format))
