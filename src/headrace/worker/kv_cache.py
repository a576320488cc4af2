"""KV cache tensors from a KVLayout. Pages are untouched memory until a token is written into them."""

from __future__ import annotations

import math

import numpy as np

from headrace.core.kv_layout import KVLayout
from headrace.ops.host_memory import untouched
from headrace.ops.kv_format import KV_FORMATS
from headrace.ops.xp import Array


class KVCache:
    """Key and value pages [num_blocks, block_size, kv_heads, head_dim] in the layout's format, one pair per memory
    tensor."""

    def __init__(self, layout: KVLayout, whole_blocks: bool = False):
        """`whole_blocks`: what a block takes in all tensors lies together, so that a new block touches one place of
        memory and not one in every tensor; pages are then no C-contiguous arrays, but their blocks are."""
        self.layout = layout
        shapes = {(group.num_kv_heads, group.head_dim) for group in layout.groups}
        if len(shapes) != 1:
            raise ValueError(f"layer groups with different key/value shapes {sorted(shapes)} cannot share one pool yet")
        ((heads, dim),) = shapes
        shape = (layout.num_blocks, layout.block_size, heads, dim)
        # zeros, not empty: the pages come zeroed and lazily from the system, and masked lanes must hold finite numbers
        kv_format = KV_FORMATS[layout.kv_format]
        self._blocks: list[Array]  # [num_blocks, ...]
        if whole_blocks:
            dtype, stored = kv_format.stored(dim)
            whole = (layout.num_blocks, 2 * layout.num_tensors, layout.block_size, heads, stored)
            blocks: Array = untouched(math.prod(whole) * np.dtype(dtype).itemsize).view(dtype).reshape(whole)
            self._blocks = [blocks]
            self._pages = [(blocks[:, 2 * i], blocks[:, 2 * i + 1]) for i in range(layout.num_tensors)]
        else:
            self._pages = [(kv_format.pages(shape), kv_format.pages(shape)) for _ in range(layout.num_tensors)]
            self._blocks = [each for pair in self._pages for each in pair]
        num_layers = sum(len(group.layers) for group in layout.groups)
        self._place = [layout.place(layer) for layer in range(num_layers)]

    def pages(self, layer: int) -> tuple[Array, Array]:
        """(key pages, value pages) of a model layer."""
        return self._pages[self._place[layer][1]]

    def group(self, layer: int) -> int:
        """The layer group whose block table and metadata serve a model layer."""
        return self._place[layer][0]

    def copy_blocks(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy whole blocks (source, destination), in every tensor."""
        if pairs:
            sources, destinations = np.array(pairs).T
            for blocks in self._blocks:
                blocks[destinations] = blocks[sources]
