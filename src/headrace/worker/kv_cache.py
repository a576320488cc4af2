"""KV cache tensors from a KVLayout. Pages are untouched memory until a token is written into them."""

from __future__ import annotations

import numpy as np

from headrace.core.kv_layout import KVLayout
from headrace.ops.kv_format import KV_FORMATS
from headrace.ops.xp import Array


class KVCache:
    """Key and value pages [num_blocks, block_size, kv_heads, head_dim] in the layout's format, one pair per memory
    tensor."""

    def __init__(self, layout: KVLayout):
        self.layout = layout
        shapes = {(group.num_kv_heads, group.head_dim) for group in layout.groups}
        if len(shapes) != 1:
            raise ValueError(f"layer groups with different key/value shapes {sorted(shapes)} cannot share one pool yet")
        ((heads, dim),) = shapes
        shape = (layout.num_blocks, layout.block_size, heads, dim)
        # zeros, not empty: the pages come zeroed and lazily from the system, and masked lanes must hold finite numbers
        kv_format = KV_FORMATS[layout.kv_format]
        self._pages = [(kv_format.pages(shape), kv_format.pages(shape)) for _ in range(layout.num_tensors)]
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
            for keys, values in self._pages:
                keys[destinations] = keys[sources]
                values[destinations] = values[sources]
