"""Token trees in attention: every node's bits are those of its path as a chain, and an accepted path can be moved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.test_reference import LAYER, VARIANTS
from headrace.attention.base import LayerAttention
from headrace.attention.native import NativeAttention
from headrace.attention.reference import ReferenceAttention
from headrace.core.kv_layout import KVGroup
from headrace.ops.kv_format import KV_FORMATS
from headrace.ops.native.library import library
from models.harness import make_batch

BACKENDS = {"reference": ReferenceAttention, "native": NativeAttention}
LAYERS = {
    **{name: VARIANTS[name] for name in ("plain", "window", "window-1", "all", "mqa-odd")},
    "wide": LayerAttention(scale=0.125, num_heads=9, num_kv_heads=3, head_dim=64),
    "many-heads": LayerAttention(scale=0.2, num_heads=60, num_kv_heads=1, head_dim=17),
}
BUSHY = [-1, 0, 0, 1, 1, 2, 3, 3, 6, 5, 7, 8]


def depths(parents: list[int]) -> np.ndarray:
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return np.array(found)


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


class Row:
    """A sequence in a cache, whose steps take any keys, values and queries; a second one goes beside it."""

    def __init__(self, backend: str, layer: LayerAttention, block_size: int, kv_format: str = "float32", seed: int = 0):
        self.layer, self.size = layer, block_size
        self.backend = BACKENDS[backend](block_size)
        self.backend.kv_format = kv_format
        count = 512 // block_size + 2
        blocks = np.random.default_rng(seed).permutation(2 * count)
        self.tables = [blocks[:count], blocks[count:]]
        shape = (2 * count, block_size, layer.num_kv_heads, layer.head_dim)
        pages = [KV_FORMATS[kv_format].pages(shape) for _ in range(2)]
        for page in pages:
            page[:] = 255 if page.dtype == np.uint8 else np.nan
        self.cache = (pages[0], pages[1])
        self.group = KVGroup((0,), layer.num_kv_heads, layer.head_dim, layer.window)
        self.length = 0

    def run(self, qkv: list[np.ndarray], parents: list[int] | None = None, beside: Any = None) -> np.ndarray:
        """Outputs of the next tokens: a chain, or a tree; `beside`: q, k and v of the other row's first tokens."""
        count = len(qkv[0])
        spans, owners = [np.arange(self.length, self.length + count)], [0]
        if beside is not None:
            spans, owners = [np.arange(len(beside[0])), *spans], [1, 0]
            qkv = [np.concatenate(pair) for pair in zip(beside, qkv, strict=True)]
        batch = make_batch(spans, [[self.tables[owner] for owner in owners]], self.size)
        if parents is not None:
            positions, all_parents = batch.positions.copy(), np.full(len(qkv[0]), -2, np.int32)
            positions[-count:] = self.length + depths(parents)
            all_parents[-count:] = parents
            batch = replace(batch, positions=positions, parents=all_parents)
        out = self.backend.run(*qkv, self.cache, self.backend.plan(batch, 0, self.group), self.layer)
        self.length += count
        return np.array(out[-count:])


def draw_qkv(rng: np.random.Generator, layer: LayerAttention, count: int) -> list[np.ndarray]:
    widths = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    return [rng.standard_normal((count, n * layer.head_dim), np.float32) for n in widths]


def take(qkv: list[np.ndarray], index: Any) -> list[np.ndarray]:
    return [each[index] for each in qkv]


def check(backend: str, layer: LayerAttention, size: int, context: int, parents: list[int], kv_format: str) -> None:
    rng = np.random.default_rng(context)
    before, nodes, after, other = (draw_qkv(rng, layer, n) for n in (context, len(parents), 5, 33))

    def row(seed: int) -> Row:
        made = Row(backend, layer, size, kv_format, seed)
        if context:
            made.run(before)
        return made

    tree = row(1)
    out = tree.run(nodes, parents, beside=other)
    for node in range(len(parents)):
        path = path_to(parents, node)
        chain = row(2)
        np.testing.assert_array_equal(out[node], chain.run(take(nodes, path))[-1], err_msg=f"node {node}")
    # the last node's path is accepted: it moves together, and the text goes on
    places = context + np.array(path), context + np.arange(len(path))
    sources, destinations = (tree.tables[0][each // size] * size + each % size for each in places)
    tree.backend.move(tree.cache, sources, destinations)
    tree.length = context + len(path)
    np.testing.assert_array_equal(tree.run(after), chain.run(after))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_node_is_the_end_of_a_chain(backend: str, name: str) -> None:
    for size, context, threads in ((16, 0, 1), (4, 61, 2), (64, 130, 1), (16, 254, 2)):
        library().set_num_threads(threads)
        check(backend, LAYERS[name], size, context, BUSHY, "float32")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_format", ["bfloat16", "int8"])
def test_in_packed_pages_too(backend: str, kv_format: str) -> None:
    for name in ("all", "wide", "mqa-odd"):
        check(backend, LAYERS[name], 16, 60, BUSHY, kv_format)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_tree(backend: str, data: st.DataObject) -> None:
    parents = [-1]
    for node in range(1, data.draw(st.integers(1, 40))):
        parents.append(data.draw(st.integers(max(0, node - 12), node - 1)))
    layer = replace(LAYER, window=data.draw(st.sampled_from([None, 3, 64])))
    check(backend, layer, data.draw(st.sampled_from([8, 16, 32])), data.draw(st.integers(0, 300)), parents, "float32")
