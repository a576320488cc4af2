"""The native CPU backend: paged attention in one call that also writes the step's keys and values.

A query's result depends on its own position and history only (csrc/attention.h), as the reference's does; the two
differ in the last bits, because the order of their sums differs. Pages keep the cache's shape and size, but inside a
block this backend has an order of its own, which nobody else may read: keys [kv heads, dim, block_size], so that
neighbouring positions fill a vector, values [kv heads, block_size, dim]; int8: the scales of a head's block behind it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from headrace.attention.base import AttentionCaps, LayerAttention
from headrace.core.kv_layout import KVGroup
from headrace.ops.kv_format import FLOAT32, KV_FORMATS
from headrace.ops.native.library import address, library, unavailable_reason
from headrace.ops.native.recording import current, empty, unrecordable
from headrace.ops.xp import Array

if TYPE_CHECKING:
    from headrace.worker.batch import StepBatch


_KV_CODES = {"float32": 0, "bfloat16": 1, "int8": 2}  # KvFormat of csrc/kernels.h


class _JobStruct(ctypes.Structure):
    """AttentionJob of csrc/kernels.h."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("q_stride", ctypes.c_ssize_t),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_ssize_t),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("block_bytes", ctypes.c_ssize_t),
        ("query_start", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_ssize_t),
        ("heads", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
        ("dim", ctypes.c_int),
        ("block_size", ctypes.c_int),
        ("window", ctypes.c_int),
        ("kv_format", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
        ("parents", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class NativeMeta:
    """A step's attention work for one layer group; the arrays are kept alive for the addresses in `job`."""

    slot_mapping: np.ndarray  # int32 [T]
    window: int | None
    block_size: int
    num_tokens: int
    num_spans: int
    arrays: tuple[np.ndarray, ...]  # query_start, positions, tables, and parents where there are trees

    @cached_property
    def job(self) -> _JobStruct:
        """Made when the model is called: a step that is replayed needs none."""
        query_start, positions, tables, *parents = self.arrays
        return _JobStruct(
            query_start=address(query_start),
            positions=address(positions),
            tables=address(tables),
            table_stride=tables.strides[0] >> 2,
            block_size=self.block_size,
            window=self.window or 0,
            parents=address(parents[0]) if parents else None,
        )

    def fixed(self) -> NativeMeta:
        """A copy with arrays of its own, wide enough for some more blocks: what a recording points to."""
        query_start, positions, tables, *parents = self.arrays
        wide = np.zeros((tables.shape[0], tables.shape[1] + 64), np.int32)
        wide[:, : tables.shape[1]] = tables
        own = (query_start.copy(), positions.copy(), wide, *(each.copy() for each in parents))
        return replace(self, slot_mapping=self.slot_mapping.copy(), arrays=own)

    def refill(self, other: NativeMeta) -> bool:
        """Take over the contents of a step of the same shape; False if they do not fit."""
        tables, found = self.arrays[2], other.arrays[2]
        shape = (self.num_tokens, self.num_spans, len(self.arrays))
        if found.shape[1] > tables.shape[1] or shape != (other.num_tokens, other.num_spans, len(other.arrays)):
            return False
        self.arrays[0][:], self.arrays[1][:] = other.arrays[:2]
        tables[:, : found.shape[1]] = found
        for own, parents in zip(self.arrays[3:], other.arrays[3:], strict=True):
            own[:] = parents
        self.slot_mapping[:] = other.slot_mapping
        return True


def _int32(array: Array) -> np.ndarray:
    return np.ascontiguousarray(array, np.int32)


def _rows(array: Array) -> np.ndarray:
    """float32 with contiguous rows; tokens may lie apart."""
    if array.dtype == np.float32 and array.strides[1] == 4:
        return array
    unrecordable()
    return np.ascontiguousarray(array, np.float32)


def _page_parts(pages: np.ndarray, kv_format: str, keys: bool) -> list[np.ndarray]:
    """Views [num_blocks, kv heads, block_size, ...] of what pages hold for a position."""
    blocks, size, heads, stored = pages.shape
    vector = stored - (4 if kv_format == "int8" else 0)
    whole = pages.reshape(blocks, heads, size * stored)
    element = 2 if kv_format == "bfloat16" else 1  # bytes of a number in uint8 pages; float32 pages hold numbers
    numbers = whole[:, :, : size * vector]
    if keys:
        parts = [numbers.reshape(blocks, heads, vector // element, size, element).transpose(0, 1, 3, 2, 4)]
    else:
        parts = [numbers.reshape(blocks, heads, size, vector)]
    if kv_format == "int8":
        parts.append(whole[:, :, size * vector :].reshape(blocks, heads, size, 4))
    return parts


class NativeAttention:
    """Attention through the native library, over pages of its own order."""

    name = "native"
    caps = AttentionCaps(devices=frozenset({"cpu"}), kv_formats=frozenset(KV_FORMATS), trees=True, whole_blocks=True)

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.kv_format = FLOAT32.name
        library()  # raises NativeError where there is none

    @staticmethod
    def unavailable() -> str | None:
        """Why the library cannot be used; None if it can."""
        return unavailable_reason()

    def plan(self, batch: StepBatch, group: int, spec: KVGroup) -> NativeMeta:
        """Metadata of `batch` for layer group number `group`. A span's positions must be consecutive, but for trees."""
        query_start, positions = _int32(batch.query_start), _int32(batch.positions)
        tables, slots = _int32(batch.block_tables[group]), _int32(batch.slot_mapping[group])
        num_spans = len(query_start) - 1
        arrays: tuple[np.ndarray, ...] = (query_start, positions, tables)
        if batch.parents is not None:
            arrays = (*arrays, _int32(batch.parents))
        return NativeMeta(slots, spec.window, self.block_size, len(positions), num_spans, arrays)

    def move(self, cache: tuple[Array, Array], sources: np.ndarray, destinations: np.ndarray) -> None:
        """See AttentionBackend.move."""
        (block, inside), (to_block, to_inside) = (divmod(each, self.block_size) for each in (sources, destinations))
        for pages, keys in zip(cache, (True, False), strict=True):
            for part in _page_parts(pages, self.kv_format, keys):
                part[to_block, :, to_inside] = part[block, :, inside]

    def run(
        self,
        q: Array,
        k: Array,
        v: Array,
        cache: tuple[Array, Array],
        meta: NativeMeta,
        layer: LayerAttention,
    ) -> Array:
        """See AttentionBackend.run. Raises ValueError where layer or pages are not those planned for."""
        keys, values = cache
        if layer.window != meta.window:
            raise ValueError(f"layer has window {layer.window}, its KV group {meta.window}")
        if keys.shape[1] != meta.block_size:
            raise ValueError(f"planned for blocks of {meta.block_size} tokens, the cache has {keys.shape[1]}")
        dtype, stored = KV_FORMATS[self.kv_format].stored(layer.head_dim)
        for page in cache:
            whole = page.strides[0] == keys.strides[0] and (not len(page) or page[0].flags.c_contiguous)
            if page.dtype != dtype or page.shape[3] != stored or not whole:
                raise ValueError(f"pages must be those of {self.kv_format}, and their blocks contiguous")
        q, k, v = _rows(q), _rows(k), _rows(v)
        out = empty(q.shape)
        sinks = None if layer.sinks is None else np.ascontiguousarray(layer.sinks, np.float32)
        job = meta.job
        job.q, job.q_stride = address(q), q.strides[0] >> 2
        job.out, job.out_stride = address(out), out.strides[0] >> 2
        job.keys, job.values, job.block_bytes = address(keys), address(values), keys.strides[0]
        job.heads, job.kv_heads, job.dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        job.kv_format = _KV_CODES[self.kv_format]
        job.scale, job.soft_cap = layer.scale, layer.soft_cap or 0.0
        job.sinks = None if sinks is None else address(sinks)
        if (recording := current()) is not None:
            # the next layer fills the same structure anew
            job = _JobStruct.from_buffer_copy(job)
            recording.keep((job, keys, values, sinks, meta))
        library().attention(
            ctypes.addressof(job),
            address(k),
            k.strides[0] >> 2,
            address(v),
            v.strides[0] >> 2,
            address(meta.slot_mapping),
            meta.num_tokens,
            meta.num_spans,
        )
        return out
