"""KV pages in a GPU's memory, head-major."""

from __future__ import annotations

import torch

from headrace.core.kv_layout import KVLayout


class DeviceKVCache:
    """Key and value pages [num_blocks, kv_heads, block_size, head_dim] in `dtype`, one pair per memory tensor."""

    def __init__(self, layout: KVLayout, dtype: torch.dtype, device: torch.device):
        self.layout = layout
        self.dtype = dtype
        shapes = {(group.num_kv_heads, group.head_dim) for group in layout.groups}
        if len(shapes) != 1:
            raise ValueError(f"layer groups with different key/value shapes {sorted(shapes)} cannot share one pool yet")
        ((heads, dim),) = shapes
        shape = (layout.num_blocks, heads, layout.block_size, dim)
        self._pages = [
            (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
            for _ in range(layout.num_tensors)
        ]
        num_layers = sum(len(group.layers) for group in layout.groups)
        self._place = [layout.place(layer) for layer in range(num_layers)]

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(key pages, value pages) of a model layer."""
        return self._pages[self._place[layer][1]]

    def group(self, layer: int) -> int:
        """The layer group whose block table and metadata serve a model layer."""
        return self._place[layer][0]

    def copy_blocks(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy whole blocks (source, destination), in every tensor."""
        if pairs:
            sources, destinations = torch.tensor(pairs, device=self._pages[0][0].device).T
            for keys, values in self._pages:
                keys[destinations] = keys[sources]
                values[destinations] = values[sources]
