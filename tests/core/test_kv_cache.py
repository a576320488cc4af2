"""KV cache memory: pages of every layer by themselves, however they lie; what is not written takes no memory."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.core.kv_layout import KVGroup, KVLayout
from headrace.ops.host_memory import untouched
from headrace.worker.kv_cache import KVCache

GROUPS = (KVGroup((0, 2, 3), 2, 8), KVGroup((1,), 2, 8, window=20))


@pytest.mark.parametrize("whole_blocks", [False, True])
@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", "int8"])
def test_pages_are_apart_and_blocks_are_copied_whole(whole_blocks: bool, kv_format: str) -> None:
    cache = KVCache(KVLayout(GROUPS, 16, 5, kv_format=kv_format), whole_blocks)
    pages = [page for layer in (0, 2, 3) for page in cache.pages(layer)]
    assert cache.pages(1)[0] is cache.pages(0)[0]  # layers of two groups share a tensor
    for number, page in enumerate(pages):
        assert page.shape[:3] == (5, 16, 2) and not page.any()
        page[:] = np.arange(5).reshape(5, 1, 1, 1) * 10 + number
    cache.copy_blocks(((1, 4), (2, 0)))
    for number, page in enumerate(pages):
        found = [int(value) for value in page[:, 0, 0, 0]]
        assert found == [20 + number, 10 + number, 20 + number, 30 + number, 10 + number]
        assert all((block == block.reshape(-1)[0]).all() and block.flags.c_contiguous for block in page)


def test_a_block_is_one_place_of_memory() -> None:
    layout = KVLayout(GROUPS, 16, 5)
    cache = KVCache(layout, whole_blocks=True)
    places = [page[2].ctypes.data for layer in (0, 2, 3) for page in cache.pages(layer)]
    first = min(places)
    assert sorted(places) == [first + number * 16 * 2 * 8 * 4 for number in range(6)]
    assert cache.pages(0)[0][3].ctypes.data - first == layout.block_bytes


def test_memory_is_taken_when_it_is_touched() -> None:
    memory = untouched(1 << 29)
    memory[123_456_789] = 7
    assert memory[123_456_789] == 7 and not memory[:1000].any() and memory.ctypes.data % (1 << 21) == 0
    with pytest.raises(MemoryError, match="bytes"):
        untouched(1 << 62)
