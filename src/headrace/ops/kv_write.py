"""Storing a step's keys and values in the paged cache."""

from __future__ import annotations

from headrace.ops.kv_format import FLOAT32, KVFormat
from headrace.ops.registry import op
from headrace.ops.xp import Array


@op
def kv_write(
    key_pages: Array, value_pages: Array, k: Array, v: Array, slot_mapping: Array, kv_format: KVFormat = FLOAT32
) -> None:
    """Write k and v [T, kv heads, D] to slots slot_mapping [T] of pages [num_blocks, block_size, kv heads, D] in
    `kv_format`.

    Slot s is token s % block_size of block s // block_size. A negative slot (padding) writes nothing; slots are
    distinct.
    """
    if slot_mapping.shape[0] and slot_mapping.min() < 0:
        real = slot_mapping >= 0
        k, v, slot_mapping = k[real], v[real], slot_mapping[real]
    block_size = key_pages.shape[1]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    key_pages[blocks, offsets] = kv_format.pack(k)
    value_pages[blocks, offsets] = kv_format.pack(v)
