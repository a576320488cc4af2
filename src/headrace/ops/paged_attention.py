"""Attention over the paged cache, the same bits for a query whatever company it keeps.

The contract that every implementation follows. A query at position p sees tiles of TILE = 64 positions, first to
p // 64, whatever the block size; tiles wholly outside its window are skipped. For each key/value head and tile:

    S = (scale * q) [G, D] x K.T [D, 64]         G query heads share one key/value head
    S = soft_cap * tanh(S / soft_cap)            where the layer has a cap
    S = -inf at positions after p or before its window
    M = max of S over all tiles, and of the head's sink logit
    P = exp(S - M);  l_tile = sum of P;  O_tile = P x V [64, D]
    O = (O_first + ... + O_last) / (l_first + ... + l_last + exp(sink - M))       tiles added in that order

Every product has the same shape for every query, so nothing depends on the other queries of the step, on the chunk
a query came in, or on where its blocks lie. Slots past the end of a row or before its window are never read: what a
block's last owner left there, NaN included, cannot leak in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.ops.kv_format import FLOAT32, KVFormat
from headrace.ops.registry import op
from headrace.ops.xp import Array, namespace

TILE = 64
SCORE_ELEMENTS = 1 << 20  # most scores held at once (4 MiB): longer work goes in slices of queries
BODY_TILES = 32  # most tiles of one row gathered at once


@dataclass(frozen=True)
class Piece:
    """Where the tiles before a query's last one lie, in units of min(block_size, 64) slots."""

    units: np.ndarray  # int64 [(num_tiles - 1) * 64 / unit size]  unit ids in order of position
    contiguous: bool  # the ids are consecutive, so a slice of the pages is enough
    slots: np.ndarray | None = None  # int64 [(num_tiles - 1) * 64]  in place of units: of a query in a token tree


@dataclass(frozen=True)
class TileGroup:
    """N queries with the same number of tiles: consecutive ones of one row, or one query each of several rows.

    `pieces` and the first axis of `tail_slots` have one entry per row: 1 (shared by the N queries) or N.
    """

    tokens: np.ndarray  # int32 [N]          index of each query in the step
    num_tiles: int
    pieces: tuple[Piece, ...]
    tail_slots: np.ndarray  # int64 [1 or N, 64]  slots of the last tile; where nothing is to be read, the query's own
    hidden_last: np.ndarray  # bool [N, 64]       positions of the last tile that come after the query
    hidden_first: np.ndarray | None  # bool [N, 64] positions of the first tile before the window; None: no such


@dataclass(frozen=True)
class TileWork:
    """A step's queries, grouped. `num_queries`: tokens beyond it are padding, and their output is zero."""

    groups: tuple[TileGroup, ...]
    num_queries: int


@dataclass(frozen=True)
class _Call:
    """What one call works on: pages as units and as slots, and the layer's settings."""

    xp: Any
    units: tuple[Array, Array]  # keys, values: [num units, unit size, kv heads, D]
    slots: tuple[Array, Array]  # keys, values: [num slots, kv heads, D]
    soft_cap: float | None
    sinks: Array | None  # [1, kv heads, G, 1]
    kv_format: KVFormat
    on_device: Callable[[np.ndarray], Array]  # numpy index or mask -> the same where the pages live

    def gather(self, which: int, piece: Piece, first: int, last: int) -> Array:
        """Tiles first .. last-1 of a piece's keys (0) or values (1): [tiles, 64, kv heads, D]."""
        if piece.slots is not None:
            return self.gather_slots(which, piece.slots.reshape(-1, TILE)[first:last])
        units = self.units[which]
        per_tile = TILE // units.shape[1]
        ids = piece.units[first * per_tile : last * per_tile]
        if piece.contiguous:
            part = units[int(ids[0]) : int(ids[0]) + len(ids)]
        else:
            part = self.xp.take(units, self.on_device(ids), axis=0)
        return self.kv_format.unpack(part.reshape(last - first, TILE, *units.shape[2:]))

    def gather_slots(self, which: int, slots: np.ndarray) -> Array:
        """The last tiles' keys (0) or values (1) for slots [P, 64]: [P, 64, kv heads, D]."""
        pages = self.slots[which]
        taken = self.xp.take(pages, self.on_device(slots.reshape(-1)), axis=0)
        return self.kv_format.unpack(taken.reshape(*slots.shape, *pages.shape[1:]))


@op
def paged_attention(
    q: Array,
    key_pages: Array,
    value_pages: Array,
    work: TileWork,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    kv_format: KVFormat = FLOAT32,
    out: Array | None = None,
) -> Array:
    """Attention output [T, heads * D] of q [T, heads * D] over C-contiguous pages [num_blocks, block_size, kv heads,
    D] in `kv_format`.

    `work` comes from attention/reference.py; the keys and values of the step itself are already in the pages.
    `sinks` [heads] are logits that take probability and give no value.
    """
    xp = namespace(q)
    num_blocks, block_size, kv_heads, stored = key_pages.shape
    unit = min(block_size, TILE)
    unit_shape = (num_blocks * block_size // unit, unit, kv_heads, stored)
    slot_shape = (num_blocks * block_size, kv_heads, stored)
    dim = stored if kv_format is FLOAT32 else (stored - kv_format.scale_bytes) // kv_format.element_bytes
    queries = q.reshape(q.shape[0], kv_heads, -1, dim)
    call = _Call(
        xp=xp,
        units=(key_pages.reshape(unit_shape), value_pages.reshape(unit_shape)),
        slots=(key_pages.reshape(slot_shape), value_pages.reshape(slot_shape)),
        soft_cap=soft_cap,
        sinks=None if sinks is None else sinks.reshape(1, kv_heads, -1, 1),
        kv_format=kv_format,
        on_device=_same if xp is np else lambda array: xp.asarray(array, device=q.device),
    )
    if out is None:
        out = xp.empty(tuple(q.shape), dtype=q.dtype)
    heads_out = out.reshape(queries.shape)
    out[work.num_queries :] = 0.0
    for group in work.groups:
        # Slicing the queries bounds the memory of long prompts; shapes per query, and so bits, stay as they are.
        step = max(1, SCORE_ELEMENTS // (group.num_tiles * queries.shape[1] * queries.shape[2] * TILE))
        for first in range(0, len(group.tokens), step):
            part = slice(first, first + step)
            tokens = call.on_device(group.tokens[part])
            heads_out[tokens] = _attend(call, queries[tokens] * scale, group, part)
    return out


def _same(array: np.ndarray) -> np.ndarray:
    return array


def _attend(call: _Call, q: Array, group: TileGroup, part: slice) -> Array:
    """Output [N, kv heads, G, D] of scaled queries q of that shape: the queries `part` of `group`."""
    xp, tiles = call.xp, group.num_tiles
    num, kv_heads, heads, dim = q.shape
    shared = len(group.pieces) == 1
    pieces = group.pieces if shared else group.pieces[part]
    tail_slots = group.tail_slots if shared else group.tail_slots[part]

    scores = xp.empty((num, tiles, kv_heads, heads, TILE), dtype=q.dtype)
    for first, last, rows, piece in _bodies(pieces, tiles, num):
        keys = xp.permute_dims(call.gather(0, piece, first, last), (0, 2, 3, 1))
        xp.matmul(q[rows, None], keys, out=scores[rows, first:last])
    tail_keys = xp.permute_dims(call.gather_slots(0, tail_slots), (0, 2, 3, 1))
    xp.matmul(q, tail_keys, out=scores[:, tiles - 1])
    if call.soft_cap is not None:
        scores = call.soft_cap * xp.tanh(scores / call.soft_cap)
    _hide(call, scores, tiles - 1, group.hidden_last[part])
    if group.hidden_first is not None:
        _hide(call, scores, 0, group.hidden_first[part])

    top = xp.max(xp.max(scores, axis=-1, keepdims=True), axis=1)  # [N, kv heads, G, 1]
    if call.sinks is not None:
        top = xp.maximum(top, call.sinks)
    scores -= top[:, None]
    weights = xp.exp(scores, out=scores)

    partial = xp.empty((num, tiles, kv_heads, heads, dim), dtype=q.dtype)
    for first, last, rows, piece in _bodies(pieces, tiles, num):
        values = xp.permute_dims(call.gather(1, piece, first, last), (0, 2, 1, 3))
        xp.matmul(weights[rows, first:last], values, out=partial[rows, first:last])
    tail_values = xp.permute_dims(call.gather_slots(1, tail_slots), (0, 2, 1, 3))
    xp.matmul(weights[:, tiles - 1], tail_values, out=partial[:, tiles - 1])

    sums = xp.sum(weights, axis=-1, keepdims=True)
    total, mass = partial[:, 0], sums[:, 0]
    for tile in range(1, tiles):  # one after the other: numpy's own sum would order them by shape
        total += partial[:, tile]
        mass += sums[:, tile]
    if call.sinks is not None:
        mass = mass + xp.exp(call.sinks - top)
    return total / mass


def _bodies(pieces: Sequence[Piece], tiles: int, num: int) -> list[tuple[int, int, slice, Piece]]:
    """(first tile, past the last, queries, piece) of every gather of tiles before the last one."""
    return [
        (first, min(first + BODY_TILES, tiles - 1), slice(0, num) if len(pieces) == 1 else slice(i, i + 1), piece)
        for first in range(0, tiles - 1, BODY_TILES)
        for i, piece in enumerate(pieces)
    ]


def _hide(call: _Call, scores: Array, tile: int, hidden: np.ndarray) -> None:
    """Set scores [N, tiles, kv heads, G, 64] of `tile` to -inf where hidden [N, 64]."""
    part = scores[:, tile]
    mask = call.on_device(hidden)[:, None, None, :]
    part[...] = call.xp.where(mask, -float("inf"), part)
