"""Attention backends and formats of the KV cache on the CPU, with what each cannot do."""

from __future__ import annotations

from headrace.attention.select import BACKENDS
from headrace.doctor.section import Section
from headrace.ops.kv_format import KV_FORMATS

HEAD_DIM = 64


def attention() -> Section:
    """Backends in order of preference, then what a token's keys or values take in each format."""
    section = Section("Attention on the CPU")
    taken = False
    for name, backend in BACKENDS.items():
        missing = getattr(backend, "unavailable", lambda: None)()
        state = f"refused: {missing}" if missing else "second choice" if taken else "first choice"
        taken = taken or not missing
        tile = backend.caps.block_tile
        limits = "" if tile is None else f"; block sizes that divide {tile} or are multiples of it"
        section.add(name, f"{state}; KV as {', '.join(sorted(backend.caps.kv_formats))}{limits}")
    for name, kv_format in KV_FORMATS.items():
        section.add(f"KV {name}", f"{kv_format.vector_bytes(HEAD_DIM)} bytes for a head of {HEAD_DIM} numbers")
    return section
