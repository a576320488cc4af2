"""PackedMatrix: weights as the native kernels read them, and the op that multiplies with them.

The layout is described in csrc/kernels.h. A matrix is packed once, when the model is loaded, into an arena of large
pages; merged layers whose parts have different formats keep one segment a format.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.ops.host_memory import untouched
from headrace.ops.linear import linear
from headrace.ops.native.library import address, library
from headrace.ops.native.recording import empty, keep, unrecordable
from headrace.ops.registry import Op, op
from headrace.ops.xp import Array

PANEL = 32
FORMATS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "I8", "Q4_64", "Q8_64")
FLOATS = FORMATS[:3]
MODES = ("exact", "default", "fast", "int8")  # Mode of csrc/api.cpp
PRODUCTS = ("float32", "int16", "bfloat16", "int8")  # Product of csrc/api.cpp
GATES = ("silu_mul", "gelu_tanh_mul", "gelu_mul", "swiglu_clamped_mul")  # kinds of `gated` in csrc/pointwise.h
_ARENA_CHUNK = 1 << 28  # address space, not memory: pages are taken when they are written


class _SegmentStruct(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("format", ctypes.c_int32), ("outputs", ctypes.c_int32)]


class Arena:
    """Memory for packed weights: cache-line aligned pieces, one behind the other, on huge pages where there are any.

    It lives as long as the pieces do; pieces are not given back one by one.
    """

    def __init__(self) -> None:
        self._chunk = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> np.ndarray:
        """uint8 [num_bytes], zeros."""
        if num_bytes > self._chunk.size:
            self._chunk = untouched(max(_ARENA_CHUNK, num_bytes))
        piece, self._chunk = self._chunk[:num_bytes], self._chunk[-(-num_bytes // 64) * 64 :]
        return piece


@dataclass(frozen=True)
class StoredTensor:
    """A matrix as a file has it."""

    format: str  # one of FORMATS
    rows: np.ndarray  # uint8 [N, row bytes]; rows contiguous
    order: np.ndarray | None  # int64 [N]: row r of the matrix is row order[r] of `rows`; None: as they are
    release: Callable[[], None] | None = None  # called when `rows` are not needed any more

    def floats(self) -> np.ndarray:
        """float32 [N, K] of a matrix in one of FLOATS."""
        rows = np.ascontiguousarray(self.rows)
        if self.format == "BF16":
            values = (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = rows.view({"F16": np.float16, "F32": np.float32}[self.format]).astype(np.float32, copy=False)
        return values if self.order is None else values[self.order]


@dataclass(frozen=True)
class Segment:
    """Some outputs of a matrix, in one format."""

    format: str
    outputs: int
    data: np.ndarray  # uint8, panels


class PackedMatrix:
    """A matrix [N, K] in segments of outputs.

    `mode`: one of MODES, which says in what numbers products are made (`product`).
    """

    def __init__(self, segments: Sequence[Segment], in_size: int, mode: str = "exact"):
        self.mode = MODES.index(mode)
        self.segments = tuple(segments)
        self.shape = (sum(segment.outputs for segment in segments), in_size)
        structs = [
            _SegmentStruct(address(segment.data), FORMATS.index(segment.format), segment.outputs)
            for segment in segments
        ]
        self._structs = (_SegmentStruct * len(structs))(*structs)
        self.segments_at = ctypes.addressof(self._structs)
        sizes = [*(segment.outputs for segment in segments), self.shape[0] // 2]
        self.pairs = self.shape[0] % 2 == 0 and all(size % PANEL == 0 for size in sizes)  # both halves are whole panels

    @property
    def size(self) -> int:
        """Numbers in the matrix."""
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return sum(segment.data.nbytes for segment in self.segments)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Rows `ids` (int32 [T], each in 0 .. N-1) as float32 [T, K]: the very numbers that products use."""
        if ids.dtype != np.int32 or not ids.flags.c_contiguous or len(self.segments) > 1:
            unrecordable()
        ids = np.ascontiguousarray(ids, np.int32)
        keep(ids)
        out = empty((len(ids), self.shape[1]))
        start, unpack = 0, library().unpack_rows
        for segment in self.segments:
            code = FORMATS.index(segment.format)
            if len(self.segments) == 1:
                unpack(code, address(segment.data), self.shape[1], address(ids), len(ids), address(out), self.shape[1])
                return out
            inside = np.flatnonzero((ids >= start) & (ids < start + segment.outputs))
            own, part = ids[inside] - np.int32(start), np.empty((len(inside), self.shape[1]), np.float32)
            unpack(code, address(segment.data), self.shape[1], address(own), len(own), address(part), self.shape[1])
            out[inside] = part
            start += segment.outputs
        return out

    def dequantize(self) -> np.ndarray:
        """float32 [N, K]."""
        return self.rows(np.arange(self.shape[0], dtype=np.int32))


def product(mode: str, format: str, tokens: int) -> str:
    """One of PRODUCTS: in what numbers the code path multiplies `tokens` tokens with a matrix in `format`."""
    return PRODUCTS[library().product(MODES.index(mode), FORMATS.index(format), tokens)]


def pack(parts: Sequence[StoredTensor], in_size: int, arena: Arena, mode: str = "exact") -> PackedMatrix:
    """One matrix of `parts`, one below the other. Neighbours of one format become one segment.

    Raises ValueError if a scale or a plain value is not finite.
    """
    segments: list[Segment] = []
    merged: list[StoredTensor] = []
    for part in [*parts, None]:
        if merged and (part is None or part.format != merged[0].format):
            segments.append(_pack_segment(merged, in_size, arena))
            merged = []
        if part is not None:
            merged.append(part)
    return PackedMatrix(segments, in_size, mode)


def _pack_segment(parts: list[StoredTensor], in_size: int, arena: Arena) -> Segment:
    lib = library()
    code = FORMATS.index(parts[0].format)
    outputs = sum(len(part.rows) for part in parts)
    panel_bytes = lib.panel_bytes(code, in_size)
    data = arena.take(-(-outputs // PANEL) * panel_bytes)
    if len(parts) == 1:
        rows, order = parts[0].rows, parts[0].order
    else:
        rows = np.concatenate([part.rows for part in parts])
        order, start = None, 0
        if any(part.order is not None for part in parts):
            orders = []
            for part in parts:
                own = np.arange(len(part.rows)) if part.order is None else part.order
                orders.append(own + start)
                start += len(part.rows)
            order = np.concatenate(orders)
    rows = np.ascontiguousarray(rows)
    order = None if order is None else np.ascontiguousarray(order, np.int64)
    order_at = None if order is None else address(order)
    if lib.pack(code, address(rows), rows.shape[1], order_at, outputs, in_size, address(data)):
        raise ValueError("holds values that are not finite")
    for part in parts:
        if part.release is not None:
            part.release()
    return Segment(parts[0].format, outputs, data)


def stored_float32(values: np.ndarray) -> StoredTensor:
    """A float32 matrix, stored in the smallest format that keeps every number as it is (BF16, F16 or F32)."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    if not (bits & 0xFFFF).any():
        return StoredTensor("BF16", np.ascontiguousarray((bits >> 16).astype(np.uint16)).view(np.uint8), None)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if (half.astype(np.float32) == values).all():
        return StoredTensor("F16", half.view(np.uint8), None)
    return StoredTensor("F32", values.view(np.uint8), None)


@op
def packed_linear(x: Array, weight: PackedMatrix, bias: Array | None = None, out: Array | None = None) -> Array:
    """x [T, K] times a packed weight [N, K] transposed, plus bias [N]: float32 [T, N], C-contiguous. T may be 0."""
    return linear(x, weight.dequantize(), bias, out=out)


@op
def packed_gated(x: Array, weight: PackedMatrix, activation: Op, bias: Array | None = None) -> Array:
    """activation of packed_linear(x, weight, bias), whose outputs are gate and up: float32 [T, N / 2]."""
    return activation(packed_linear(x, weight, bias))


@packed_linear.variant("native")
def _native_linear(
    x: np.ndarray, weight: PackedMatrix, bias: np.ndarray | None = None, out: np.ndarray | None = None
) -> np.ndarray:
    return _product(x, weight, bias, out, weight.shape[0], -1)


@packed_gated.variant("native")
def _native_gated(x: np.ndarray, weight: PackedMatrix, activation: Op, bias: np.ndarray | None = None) -> np.ndarray:
    if activation.bound != "native" or activation.name not in GATES or not weight.pairs:
        return activation(packed_linear(x, weight, bias))
    return _product(x, weight, bias, None, weight.shape[0] // 2, GATES.index(activation.name))


def _product(
    x: np.ndarray, weight: PackedMatrix, bias: np.ndarray | None, out: np.ndarray | None, out_size: int, gate: int
) -> np.ndarray:
    """`gate`: place of an activation in GATES, or -1."""
    num_tokens, in_size = x.shape
    if in_size != weight.shape[1]:
        raise ValueError(f"{in_size} inputs for a weight {list(weight.shape)}")
    if x.dtype != np.float32 or x.strides[1] != 4:
        unrecordable()
        x = np.ascontiguousarray(x, np.float32)
    if out is None:
        out = empty((num_tokens, out_size))
    elif out.shape != (num_tokens, out_size) or out.dtype != np.float32 or out.strides[1] != 4:
        raise ValueError(f"out must be float32 {[num_tokens, out_size]} with contiguous rows")
    library().linear(
        weight.segments_at,
        len(weight.segments),
        in_size,
        address(x),
        x.strides[0] >> 2,
        num_tokens,
        None if bias is None else address(bias),
        address(out),
        out.strides[0] >> 2,
        weight.mode,
        gate,
    )
    return out
