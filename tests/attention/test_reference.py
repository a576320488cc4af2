"""The reference backend against plain softmax in float64, and its bits in every company."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.attention.base import LayerAttention
from headrace.attention.reference import ReferenceAttention
from headrace.core.kv_layout import KVGroup
from models.harness import make_batch

LENGTH = 210
LAYER = LayerAttention(scale=0.3, num_heads=6, num_kv_heads=2, head_dim=8)
SINKS = np.array([0.5, -1, 2, 0, 3, -4], np.float32)
VARIANTS = {
    "plain": LAYER,
    "window": replace(LAYER, window=50),
    "window-1": replace(LAYER, window=1),
    "window-tile": replace(LAYER, window=64),
    "window-long": replace(LAYER, window=100),
    "cap": replace(LAYER, soft_cap=1.5),
    "sinks": replace(LAYER, sinks=SINKS),
    "all": replace(LAYER, window=70, soft_cap=2.0, sinks=SINKS),
    "mha": replace(LAYER, num_kv_heads=6),
    "mqa-odd": replace(LAYER, num_kv_heads=1, head_dim=5),
}


class World:
    """One layer's keys, values and queries of some rows, run through the backend in any spans."""

    def __init__(
        self,
        layer: LayerAttention,
        rows: int = 3,
        block_size: int = 16,
        seed: int = 0,
        shuffle: bool = True,
        backend: Any = ReferenceAttention,
    ):
        self.layer, self.block_size, self.rows = layer, block_size, rows
        rng = np.random.default_rng(7)
        widths = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        self.qkv = [rng.standard_normal((rows, LENGTH, n * layer.head_dim), np.float32) for n in widths]
        per_row = -(-LENGTH // block_size)
        blocks = np.random.default_rng(seed).permutation(rows * per_row + 2)
        self.tables = [np.sort(t) if not shuffle else t for t in blocks[2:].reshape(rows, per_row)]
        if not shuffle:
            self.tables = list(np.arange(rows * per_row).reshape(rows, per_row))
        shape = (rows * per_row + 2, block_size, layer.num_kv_heads, layer.head_dim)
        self.cache = (np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32))
        self.backend = backend(block_size)
        self.group = KVGroup((0,), layer.num_kv_heads, layer.head_dim, layer.window)
        self.lengths = [0] * rows

    def run(self, spans: dict[int, int], wrap: Any = lambda array: array, padding: int = 0) -> dict[int, np.ndarray]:
        """Run the next spans[row] tokens of each row, in the dict's order; outputs by row."""
        positions = [np.arange(self.lengths[row], self.lengths[row] + n) for row, n in spans.items()]
        batch = make_batch(positions, [[self.tables[row] for row in spans]], self.block_size, padding=padding)
        meta = self.backend.plan(batch, 0, self.group)
        q, k, v = (np.concatenate([x[row, p] for row, p in zip(spans, positions, strict=True)]) for x in self.qkv)
        if padding:
            q, k, v = (np.concatenate([x, np.full((padding, x.shape[1]), np.nan, np.float32)]) for x in (q, k, v))
        meta = replace(meta, slot_mapping=wrap(meta.slot_mapping))
        cache = (wrap(self.cache[0]), wrap(self.cache[1]))
        out = np.asarray(self.backend.run(wrap(q), wrap(k), wrap(v), cache, meta, self.layer))
        assert out.shape == q.shape and out.dtype == np.float32
        if padding:
            assert not out[-padding:].any()
        for row, n in spans.items():
            self.lengths[row] += n
        ends = np.cumsum([0, *spans.values()])
        return {row: out[a:b] for row, (a, b) in zip(spans, pairwise(ends), strict=True)}

    def exact(self, row: int) -> np.ndarray:
        """Softmax attention of every position, float64 [LENGTH, heads * D]."""
        layer = self.layer
        q, k, v = (x[row].reshape(LENGTH, -1, layer.head_dim).astype(np.float64) for x in self.qkv)
        share = layer.num_heads // layer.num_kv_heads
        k, v = np.repeat(k, share, 1), np.repeat(v, share, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * np.tanh(scores / layer.soft_cap)
        distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
        hidden = (distance < 0) | (distance >= (layer.window or LENGTH))
        weights = np.exp(np.where(hidden, -np.inf, scores))
        mass = weights.sum(-1, keepdims=True)
        if layer.sinks is not None:
            mass = mass + np.exp(layer.sinks.astype(np.float64))[:, None, None]
        return np.einsum("hqk,khd->qhd", weights / mass, v).reshape(LENGTH, -1)


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_softmax_and_no_company_changes_a_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = VARIANTS[name]
    whole = World(layer).run({0: LENGTH})[0]
    np.testing.assert_allclose(whole, World(layer).exact(0), rtol=1e-5, atol=1e-5)

    for block_size, shuffle in ((16, False), (4, True), (64, True), (128, True)):
        world = World(layer, block_size=block_size, seed=3, shuffle=shuffle)
        parts = [
            world.run({1: 130, 0: 3, 2: 64})[0],
            world.run({0: 127, 1: 1})[0],
            world.run({2: 1, 1: 1, 0: 1}, padding=2)[0],
            world.run({0: 1, 2: 70})[0],
            world.run({0: 5, 1: 1, 2: 5})[0],
            world.run({1: 77, 0: LENGTH - 137})[0],
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole)

    module = sys.modules["headrace.ops.paged_attention"]  # ops.paged_attention is the op, not its module
    monkeypatch.setattr(module, "SCORE_ELEMENTS", 5000)
    monkeypatch.setattr(module, "BODY_TILES", 1)
    np.testing.assert_array_equal(World(layer, seed=4).run({0: LENGTH})[0], whole)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_cut_gives_the_same_bits(data: st.DataObject) -> None:
    layer = VARIANTS[data.draw(st.sampled_from(["plain", "window", "all"]))]
    whole = World(layer).run({0: LENGTH})[0]
    world = World(layer, block_size=data.draw(st.sampled_from([8, 32])), seed=data.draw(st.integers(0, 9)))
    parts = []
    while world.lengths[0] < LENGTH:
        spans = {
            row: data.draw(st.integers(1, LENGTH - world.lengths[row]))
            for row in data.draw(st.permutations(range(3)))
            if world.lengths[row] < LENGTH and (row == 0 or data.draw(st.booleans()))
        }
        parts.append(world.run(spans)[0])
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_runs_on_torch(name: str) -> None:
    layer = VARIANTS[name]
    torch_layer = layer if layer.sinks is None else replace(layer, sinks=torch.from_numpy(SINKS))
    expected, world = World(layer), World(torch_layer)
    for spans in ({0: 150, 1: 70, 2: 1}, {2: 1, 1: 1, 0: 1}):
        found = world.run(spans, wrap=lambda array: torch.from_numpy(np.asarray(array)))
        for row, values in expected.run(spans).items():
            np.testing.assert_allclose(found[row], values, rtol=1e-5, atol=1e-6)


def test_blocks_before_the_window_are_not_read() -> None:
    layer = VARIANTS["window"]
    whole = World(layer).run({0: LENGTH})[0]
    world = World(layer)
    world.run({0: LENGTH - 1})
    first_kept = (LENGTH - layer.window) // world.block_size
    for pages in world.cache:
        pages[world.tables[0][:first_kept]] = np.nan
    world.tables[0][:first_kept] = 0
    np.testing.assert_array_equal(world.run({0: 1})[0], whole[-1:])


def test_refuses_what_it_was_not_planned_for() -> None:
    with pytest.raises(ValueError, match="block size 24 neither divides 64 nor is a multiple"):
        ReferenceAttention(24)
    world = World(VARIANTS["window"])
    world.layer = LAYER
    with pytest.raises(ValueError, match="layer has window None, its KV group 50"):
        world.run({0: 3})
