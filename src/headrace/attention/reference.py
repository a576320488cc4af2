"""The reference backend: paged attention in plain array code, bitwise independent of the batch.

`plan` groups a step's queries by the number of 64-position tiles they see; `ops/paged_attention.py` holds the
contract and the arithmetic. Rows at the same number of tiles go through one call, and so do a chunk's queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace import ops
from headrace.attention.base import AttentionCaps, LayerAttention
from headrace.core.kv_layout import KVGroup
from headrace.ops.kv_format import FLOAT32, KV_FORMATS
from headrace.ops.paged_attention import TILE, Piece, TileGroup, TileWork
from headrace.ops.xp import Array
from headrace.worker.batch import StepBatch


@dataclass(frozen=True)
class ReferenceMeta:
    """A step's attention work for one layer group."""

    slot_mapping: Array  # int32 [T]
    window: int | None
    block_size: int
    work: TileWork


@dataclass(frozen=True)
class _Stretch:
    """Consecutive queries of one span that see the same tiles."""

    token: int  # index of the first one in the step
    position: int  # its position
    length: int
    first_tile: int
    last_tile: int
    root: int = 0  # of a query in a token tree: the position of the tree's first token, and the places in the span of
    path: np.ndarray | None = None  # the query and its ancestors, by depth

    def places(self, positions: np.ndarray) -> np.ndarray:
        """Where in the row's blocks the tokens at these positions lie, as the queries see them."""
        if self.path is None:
            return positions
        depth = np.clip(positions - self.root, 0, len(self.path) - 1)
        return np.where(positions > self.root, self.root + self.path[depth], positions)


class ReferenceAttention:
    """Attention through the op `paged_attention`, over token-major pages."""

    name = "reference"
    caps = AttentionCaps(devices=frozenset({"cpu"}), kv_formats=frozenset(KV_FORMATS), block_tile=TILE, trees=True)

    def __init__(self, block_size: int):
        if TILE % block_size and block_size % TILE:
            raise ValueError(f"block size {block_size} neither divides {TILE} nor is a multiple of it")
        self.block_size = block_size
        self.kv_format = FLOAT32.name

    def plan(self, batch: StepBatch, group: int, spec: KVGroup) -> ReferenceMeta:
        """Metadata of `batch` for layer group number `group`. A span's positions must be consecutive, but for trees."""
        tables = np.asarray(batch.block_tables[group])
        starts = np.asarray(batch.query_start).tolist()
        positions = np.asarray(batch.positions)
        parents = None if batch.parents is None else np.asarray(batch.parents)
        singles: dict[int, list[tuple[_Stretch, np.ndarray]]] = {}
        groups = []
        for span, table in enumerate(tables):
            first, last = starts[span], starts[span + 1]
            if first == last:
                continue
            if parents is not None and parents[first] == -1:
                found = _tree_stretches(first, positions[first:last], parents[first:last], spec.window)
            else:
                found = _stretches(first, int(positions[first]), last - first, spec.window)
            for stretch in found:
                if stretch.length == 1:
                    tiles = stretch.last_tile - stretch.first_tile + 1
                    singles.setdefault(tiles, []).append((stretch, table))
                else:
                    groups.append(self._group([(stretch, table)], spec.window))
        groups += [self._group(members, spec.window) for members in singles.values()]
        return ReferenceMeta(
            slot_mapping=batch.slot_mapping[group],
            window=spec.window,
            block_size=self.block_size,
            work=TileWork(tuple(groups), num_queries=starts[-1]),
        )

    def move(self, cache: tuple[Array, Array], sources: np.ndarray, destinations: np.ndarray) -> None:
        """See AttentionBackend.move."""
        for pages in cache:
            slots = pages.reshape(-1, *pages.shape[2:])
            slots[destinations] = slots[sources]

    def run(
        self,
        q: Array,
        k: Array,
        v: Array,
        cache: tuple[Array, Array],
        meta: ReferenceMeta,
        layer: LayerAttention,
    ) -> Array:
        """See AttentionBackend.run. Raises ValueError where layer or pages are not those planned for."""
        key_pages, value_pages = cache
        if layer.window != meta.window:
            raise ValueError(f"layer has window {layer.window}, its KV group {meta.window}")
        if key_pages.shape[1] != meta.block_size:
            raise ValueError(f"planned for blocks of {meta.block_size} tokens, the cache has {key_pages.shape[1]}")
        heads = (-1, layer.num_kv_heads, layer.head_dim)
        kv_format = KV_FORMATS[self.kv_format]
        ops.kv_write(key_pages, value_pages, k.reshape(heads), v.reshape(heads), meta.slot_mapping, kv_format)
        return ops.paged_attention(
            q,
            key_pages,
            value_pages,
            meta.work,
            scale=layer.scale,
            soft_cap=layer.soft_cap,
            sinks=layer.sinks,
            kv_format=kv_format,
        )

    def _group(self, members: list[tuple[_Stretch, np.ndarray]], window: int | None) -> TileGroup:
        """A group of several single queries, or of one stretch."""
        stretches = [stretch for stretch, _ in members]
        tokens = np.concatenate([s.token + np.arange(s.length) for s in stretches])
        queries = np.concatenate([s.position + np.arange(s.length) for s in stretches])[:, None]  # positions [N, 1]
        offsets = np.arange(TILE)
        first_tile = np.array([s.first_tile for s in stretches])[:, None]
        last_tile = np.array([s.last_tile for s in stretches])[:, None]
        hidden_last = last_tile * TILE + offsets > queries
        hidden_first = None
        if window is not None:
            before = first_tile * TILE + offsets <= queries - window
            hidden_first = before if before.any() else None
        return TileGroup(
            tokens=tokens,
            num_tiles=stretches[0].last_tile - stretches[0].first_tile + 1,
            pieces=tuple(self._body(stretch, table, window) for stretch, table in members),
            tail_slots=np.stack([self._tail(stretch, table, window) for stretch, table in members]),
            hidden_last=hidden_last,
            hidden_first=hidden_first,
        )

    def _body(self, stretch: _Stretch, table: np.ndarray, window: int | None) -> Piece:
        """Unit ids of all tiles but the last; units before the window repeat the first one in it."""
        if stretch.path is not None:
            places = np.arange(stretch.first_tile * TILE, stretch.last_tile * TILE)
            places = stretch.places(np.maximum(places, _first_visible(stretch.position, window)))
            return Piece(np.zeros(0, np.int64), contiguous=False, slots=self._slots(table, places))
        unit = min(self.block_size, TILE)
        per_block = self.block_size // unit
        wanted = np.arange(stretch.first_tile * (TILE // unit), stretch.last_tile * (TILE // unit))
        wanted = np.maximum(wanted, _first_visible(stretch.position, window) // unit)
        units = table[wanted // per_block].astype(np.int64) * per_block + wanted % per_block
        return Piece(units, contiguous=bool((np.diff(units) == 1).all()))

    def _tail(self, stretch: _Stretch, table: np.ndarray, window: int | None) -> np.ndarray:
        """Slots [64] of the last tile; positions nobody may see repeat the first query's own."""
        wanted = stretch.last_tile * TILE + np.arange(TILE)
        seen = (wanted < stretch.position + stretch.length) & (wanted >= _first_visible(stretch.position, window))
        return self._slots(table, stretch.places(np.where(seen, wanted, stretch.position)))

    def _slots(self, table: np.ndarray, places: np.ndarray) -> np.ndarray:
        return table[places // self.block_size].astype(np.int64) * self.block_size + places % self.block_size


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _stretches(token: int, position: int, length: int, window: int | None) -> list[_Stretch]:
    """Cut a span of `length` queries from `position` on where the first or the last tile that they see changes."""
    found = []
    end = position + length
    while position < end:
        first_tile, last_tile = _first_visible(position, window) // TILE, position // TILE
        cut = min(end, (last_tile + 1) * TILE)
        if window is not None:
            cut = min(cut, (first_tile + 1) * TILE + window - 1)
        found.append(_Stretch(token, position, cut - position, first_tile, last_tile))
        token, position = token + cut - position, cut
    return found


def _tree_stretches(token: int, positions: np.ndarray, parents: np.ndarray, window: int | None) -> list[_Stretch]:
    """Each query of a token tree by itself, with its ancestors."""
    root = int(positions[0])
    found = []
    for index, position in enumerate(positions.tolist()):
        path = np.zeros(position - root + 1, np.int64)
        at = index
        for depth in range(position - root, -1, -1):
            path[depth] = at
            at = int(parents[at])
        tiles = _first_visible(position, window) // TILE, position // TILE
        found.append(_Stretch(token + index, position, 1, *tiles, root, path))
    return found
