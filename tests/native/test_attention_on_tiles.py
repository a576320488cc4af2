"""Attention over keys and values in bfloat16 on paths with tiles: few query vectors, which are multiplied in registers,
have the bits that they have on tiles, for heads of every width and groups of every size."""

from __future__ import annotations

import numpy as np
import pytest

from attention.test_reference import LENGTH
from headrace.attention.base import LayerAttention
from headrace.attention.native import NativeAttention
from headrace.ops.native.library import library
from native.test_native_attention import PackedWorld, tolerance

LAYERS = {
    f"{heads} to {kv_heads}, {dim}": LayerAttention(dim**-0.5, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
    for heads, kv_heads, dim in (
        (2, 2, 16),
        (4, 2, 33),
        (3, 1, 40),
        (4, 1, 48),
        (5, 1, 80),
        (9, 3, 96),
        (17, 1, 64),
        (4, 4, 256),
        (33, 1, 24),
    )
}


@pytest.mark.parametrize("name", LAYERS)
def test_few_query_vectors_have_the_bits_of_many(path: str, name: str) -> None:
    """One token after the other, then some, then the rest, over blocks whose keys lie side by side or do not."""
    if not path.startswith("amx"):
        pytest.skip("a path without tiles")
    layer = LAYERS[name]
    whole = PackedWorld("bfloat16", layer, backend=NativeAttention).run({0: LENGTH})[0]
    expected = PackedWorld("bfloat16", layer).run({0: LENGTH})[0]
    np.testing.assert_allclose(whole, expected, **tolerance(path, "bfloat16"))
    for block_size, threads in ((16, 1), (32, 2), (5, 1)):
        library().set_num_threads(threads)
        world = PackedWorld("bfloat16", layer, block_size=block_size, backend=NativeAttention)
        counts = [1, 1, 2, 27, 1, 1, 3, 95, 1, 4, 1]
        parts = [world.run({0: count, 1: 2})[0] for count in counts]
        parts.append(world.run({0: LENGTH - sum(counts)})[0])
        np.testing.assert_array_equal(np.concatenate(parts), whole)
