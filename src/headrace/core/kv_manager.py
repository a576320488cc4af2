"""KVCacheManager: which blocks each request holds, in each layer group."""

from __future__ import annotations

from headrace.core.block_pool import BlockPool
from headrace.core.kv_layout import KVLayout
from headrace.core.plan import NewBlocks
from headrace.core.request import Request


class KVCacheManager:
    """Block tables of requests over one pool. A table grows with `allocate` and goes back with `free`."""

    def __init__(self, layout: KVLayout):
        self.layout = layout
        self.pool = BlockPool(layout.num_blocks)
        self._tables: dict[str, list[list[int]]] = {}

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the whole pool can hold."""
        return self.layout.num_tokens

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` takes over all groups."""
        return -(-num_tokens // self.layout.block_size) * len(self.layout.groups)

    def held(self, request: Request) -> int:
        """Blocks the request holds over all groups."""
        return sum(len(table) for table in self._tables.get(request.id, ()))

    def shortfall(self, request: Request, num_tokens: int) -> int:
        """Blocks to be taken so that the first `num_tokens` tokens have slots."""
        return max(0, self.blocks_for(num_tokens) - self.held(request))

    def allocate(self, request: Request, num_tokens: int) -> list[NewBlocks] | None:
        """Give the request slots for its first `num_tokens` tokens; None (and no change) if blocks are short."""
        missing = self.shortfall(request, num_tokens)
        if not missing:
            return []
        ids = self.pool.take(missing)
        if ids is None:
            return None
        tables = self._tables.setdefault(request.id, [[] for _ in self.layout.groups])
        each = missing // len(tables)
        news = []
        for group, table in enumerate(tables):
            share = ids[group * each : (group + 1) * each]
            news.append(NewBlocks(request.row, group, len(table), share))
            table.extend(share)
        request.num_slots = len(tables[0]) * self.layout.block_size
        return news

    def free(self, request: Request, after_step: int) -> int:
        """Give back everything the request holds, reusable once step `after_step` committed; returns the count."""
        tables = self._tables.pop(request.id, [])
        for table in tables:
            self.pool.release(table, after_step)
        return sum(map(len, tables))

    def check(self) -> None:
        """The full account of the pool; raises AssertionError on a leak."""
        self.pool.check(table for tables in self._tables.values() for table in tables)
