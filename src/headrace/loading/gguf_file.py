"""GGUFFile: a GGUF file's metadata and tensors over mmap. Nothing in the file is trusted.

Layout (versions 2 and 3, little-endian): magic, version, tensor_count, kv_count; the key/value pairs; the tensor infos
(name, dimensions, type, offset); padding; the tensors' data. Every count, length, dimension and offset is compared
with the file's size before anything is allocated or looped over. Arrays of the metadata are only skipped over at
first and decoded when asked for, since a vocabulary is tens of thousands of strings.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.loading import gguf_strings
from headrace.loading.errors import CheckpointError
from headrace.loading.gguf_types import (
    ARRAY,
    BOOL,
    PLAIN_DTYPES,
    SCALAR_FORMATS,
    STRING,
    TENSOR_TYPES,
    VALUE_NAMES,
    TensorType,
)

MAX_NAME = 1 << 16  # bytes of a key's or tensor's name
MAX_ARRAY = 1 << 26  # elements of a metadata array: bounds the time that skipping over strings can take
MAX_DIMS = 4
MIN_KEY_BYTES = 8 + 4 + 1  # of a key/value pair: length, type, smallest value
MIN_INFO_BYTES = 8 + 4 + 8 + 4 + 8  # of a tensor info: length, n_dims, one dimension, type, offset
MAX_ALIGNMENT = 1 << 20
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `shape` is outermost first, as in Hugging Face files ([out, in] for a linear weight)."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int  # bytes from the start of the file
    num_bytes: int

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.block * self.type.size


@dataclass(frozen=True)
class GGUFArray:
    """An array of the metadata that has been checked to lie inside the file, and not been decoded yet."""

    key: str
    type: int  # of its elements
    count: int
    offset: int

    def __len__(self) -> int:
        return self.count


class GGUFFile:
    """An open GGUF file: `version`, `metadata`, `tensors`, and readers. Raises CheckpointError for any fault in it."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}  # bool, int, float, str or GGUFArray
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with open(self.path, "rb") as file:
                self.num_bytes = os.fstat(file.fileno()).st_size
                if self.num_bytes < 24:
                    raise self._error(f"has {self.num_bytes} bytes, too few for a GGUF header; fetch it again")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror}") from None
        self._pos = 0
        self._where = "header"
        try:
            self._parse()
        except (struct.error, OverflowError):
            raise self._error(f"{self._where}: runs past the end of the file ({self.num_bytes} bytes)") from None

    # Reading tensors

    def info(self, name: str) -> TensorInfo:
        """Where the tensor lies; CheckpointError if there is none of that name."""
        if name not in self.tensors:
            raise self._error(f"has no tensor {name!r}")
        return self.tensors[name]

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes as stored, uint8 [rows, row_bytes]: a read-only view of the file."""
        info = self.info(name)
        data = np.frombuffer(self._map, np.uint8, info.num_bytes, info.offset)
        return data.reshape(info.num_rows, info.row_bytes)

    def release(self, name: str) -> None:
        """Let the tensor's pages of the file go from this process's memory; reading them again brings them back."""
        info = self.info(name)
        start = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = info.offset + info.num_bytes - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32 in `info(name).shape`, read-only where it is stored so; values must be finite."""
        info = self.info(name)
        return np.require(self._decode(info, self.raw(name)).reshape(info.shape), requirements=["C", "A"])

    def read_rows(self, name: str, rows: slice | np.ndarray) -> np.ndarray:
        """Some rows as `read` gives them, float32 [N, K]; a row is the last dimension."""
        info = self.info(name)
        return self._decode(info, self.raw(name)[rows]).reshape(-1, info.shape[-1])

    def _decode(self, info: TensorInfo, raw: np.ndarray) -> np.ndarray:
        """Stored rows as float32."""
        name, type_name = info.name, info.type.name
        with np.errstate(all="ignore"):  # the check below says what is wrong with NaN and infinite scales
            if type_name in PLAIN_DTYPES:
                values = raw.view(PLAIN_DTYPES[type_name]).astype(np.float32, copy=False)
            elif type_name == "BF16":
                values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                values = self._dequantize(info, raw)
        if not all_finite(values):
            raise self._error(f"tensor {name!r} ({type_name}) holds values that are not finite; fetch it again")
        return values

    def _dequantize(self, info: TensorInfo, raw: np.ndarray) -> np.ndarray:
        from gguf.constants import GGMLQuantizationType  # slow to import, and not needed to look at a file
        from gguf.quants import dequantize

        try:
            return dequantize(raw, GGMLQuantizationType(info.type.id))
        except (NotImplementedError, ValueError):
            raise self._error(f"tensor {info.name!r}: type {info.type.name} cannot be dequantised") from None

    # Reading metadata

    def strings(self, key: str) -> list[str]:
        """An array of strings. Bytes that are not UTF-8 become U+FFFD."""
        array = self._array(key)
        if array.type != STRING:
            raise self._error(f"key {key!r} must be an array of strings, not of {VALUE_NAMES[array.type]}")
        return gguf_strings.read(self._map, array.offset, array.count)

    def numbers(self, key: str) -> np.ndarray:
        """An array of numbers, in the type it is stored in."""
        array = self._array(key)
        if array.type == STRING:
            raise self._error(f"key {key!r} must be an array of numbers, not of strings")
        return np.frombuffer(self._map, "<" + SCALAR_FORMATS[array.type], array.count, array.offset).copy()

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string, or `default` where the key is absent."""
        value = self.metadata.get(key, default)
        if value is not default and not isinstance(value, str):
            raise self._error(f"key {key!r} must be a string, not {_kind(value)}")
        return value

    def integer(self, key: str, default: int | None = None) -> int | None:
        """An integer, or `default` where the key is absent."""
        value = self.metadata.get(key, default)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._error(f"key {key!r} must be an integer, not {_kind(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """A finite number, or `default` where the key is absent."""
        value = self.metadata.get(key, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._error(f"key {key!r} must be a number, not {_kind(value)}")
        if not math.isfinite(value):
            raise self._error(f"key {key!r} must be finite, not {value}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        """A boolean, or `default` where the key is absent."""
        value = self.metadata.get(key, default)
        if value is not default and not isinstance(value, bool):
            raise self._error(f"key {key!r} must be a boolean, not {_kind(value)}")
        return value

    def _array(self, key: str) -> GGUFArray:
        value = self.metadata.get(key)
        if not isinstance(value, GGUFArray):
            raise self._error(f"key {key!r} " + ("is missing" if value is None else f"is {_kind(value)}, not an array"))
        return value

    # Parsing the header

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")

    def _parse(self) -> None:
        if self._map[:4] != b"GGUF":
            raise self._error(f"is not a GGUF file (it starts with {self._map[:4]!r})")
        self._pos = 4
        version = self._u32()
        if version & 0xFFFF == 0 and version:
            raise self._error("is big-endian (byte order of another machine); convert it to little-endian first")
        if version not in (2, 3):
            raise self._error(f"GGUF version {version} is not supported (2 and 3 are)")
        self.version = version
        num_tensors, num_keys = self._u64(), self._u64()
        self._bound(num_keys, MIN_KEY_BYTES, "kv_count")
        for index in range(num_keys):
            self._where = f"key {index}"
            self._parse_pair(index)
        self._where = "tensor_count"
        self._bound(num_tensors, MIN_INFO_BYTES, "tensor_count")
        alignment = self.integer("general.alignment", 32)
        if not alignment or alignment & (alignment - 1) or not 0 < alignment <= MAX_ALIGNMENT:
            raise self._error(f"key 'general.alignment' must be a power of two up to {MAX_ALIGNMENT}, not {alignment}")
        infos = []
        for index in range(num_tensors):
            self._where = f"tensor {index}"
            infos.append(self._parse_info(index))
        self._place(infos, alignment)

    def _parse_pair(self, index: int) -> None:
        key = self._name(f"key {index}")
        self._where = f"key {key!r}"
        if key in self.metadata:
            raise self._error(f"key {key!r} appears twice")
        self.metadata[key] = self._value(key, self._u32())

    def _value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self._bytes(f"key {key!r}: a string").decode("utf-8", "replace")
        if kind == ARRAY:
            return self._skip_array(key)
        if kind not in SCALAR_FORMATS:
            raise self._error(f"key {key!r} has the unknown value type {kind}")
        if kind == BOOL:
            byte = self._map[self._pos] if self._pos < self.num_bytes else 2
            if byte > 1:
                raise self._error(f"key {key!r}: a boolean must be 0 or 1")
        layout = struct.Struct("<" + SCALAR_FORMATS[kind])
        (value,) = layout.unpack_from(self._map, self._pos)
        self._pos += layout.size
        return value

    def _skip_array(self, key: str) -> GGUFArray:
        kind, count = self._u32(), self._u64()
        if kind == ARRAY:
            raise self._error(f"key {key!r}: arrays of arrays are not supported")
        if kind != STRING and kind not in SCALAR_FORMATS:
            raise self._error(f"key {key!r} is an array of the unknown value type {kind}")
        size = 8 if kind == STRING else struct.calcsize("<" + SCALAR_FORMATS[kind])
        self._bound(count, size, f"key {key!r}: array length")
        if count > MAX_ARRAY:
            raise self._error(f"key {key!r}: {count} elements are more than an array may have ({MAX_ARRAY})")
        start = pos = self._pos
        if kind == STRING:
            try:
                pos = gguf_strings.skip(self._map, pos, count)
            except struct.error:
                raise self._error(f"key {key!r}: a string runs past the end of the file") from None
        else:
            pos += count * size
        self._pos = pos
        return GGUFArray(key, kind, count, start)

    def _parse_info(self, index: int) -> tuple[str, tuple[int, ...], TensorType, int]:
        name = self._name(f"tensor {index}")
        self._where = f"tensor {name!r}"
        num_dims = self._u32()
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._error(f"tensor {name!r} has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
        dims = struct.unpack_from(f"<{num_dims}Q", self._map, self._pos)
        self._pos += 8 * num_dims
        type_id, offset = self._u32(), self._u64()
        kind = TENSOR_TYPES.get(type_id)
        if kind is None:
            raise self._error(f"tensor {name!r} has the unknown type id {type_id}")
        if 0 in dims:
            raise self._error(f"tensor {name!r} has a dimension of 0: {list(dims)}")
        if dims[0] % kind.block:
            raise self._error(
                f"tensor {name!r}: rows of {dims[0]} elements do not divide into {kind.name} blocks of {kind.block}"
            )
        return name, tuple(reversed(dims)), kind, offset

    def _place(self, infos: list[tuple[str, tuple[int, ...], TensorType, int]], alignment: int) -> None:
        """Turn offsets within the data into offsets within the file, and check that every tensor lies inside it."""
        data = -(-self._pos // alignment) * alignment
        if any(self._map[self._pos : data]):
            raise self._error("tensor_count is wrong: the bytes after the last tensor info are not padding")
        end = data
        for name, shape, kind, offset in infos:
            if name in self.tensors:
                raise self._error(f"tensor {name!r} appears twice")
            if offset % alignment:
                raise self._error(f"tensor {name!r}: offset {offset} is not a multiple of the alignment {alignment}")
            num_bytes = math.prod(shape) // kind.block * kind.size
            if data + offset + num_bytes > self.num_bytes:
                raise self._error(
                    f"tensor {name!r} {list(shape)} {kind.name} needs bytes {data + offset} to "
                    f"{data + offset + num_bytes}, past the end of the file ({self.num_bytes} bytes); fetch it again"
                )
            self.tensors[name] = TensorInfo(name, shape, kind, data + offset, num_bytes)
            end = max(end, data + offset + num_bytes)
        if self.num_bytes - end >= alignment and any(self._map[end : min(self.num_bytes, end + (1 << 16))]):
            raise self._error(
                f"tensor_count is wrong: {self.num_bytes - end} bytes of data belong to none of {len(infos)} tensors"
            )

    def _bound(self, count: int, each: int, what: str) -> None:
        """Refuse a count of things of at least `each` bytes that the rest of the file cannot hold."""
        if count * each > self.num_bytes - self._pos:
            raise self._error(f"{what} is {count}, more than a file of {self.num_bytes} bytes can hold")

    def _u32(self) -> int:
        (value,) = _U32.unpack_from(self._map, self._pos)
        self._pos += 4
        return value

    def _u64(self) -> int:
        (value,) = _U64.unpack_from(self._map, self._pos)
        self._pos += 8
        return value

    def _bytes(self, what: str) -> bytes:
        length = self._u64()
        if length > self.num_bytes - self._pos:
            raise self._error(f"{what} of {length} bytes runs past the end of the file ({self.num_bytes} bytes)")
        start, self._pos = self._pos, self._pos + length
        return self._map[start : self._pos]

    def _name(self, what: str) -> str:
        data = self._bytes(f"{what}: a name")
        if not data or len(data) > MAX_NAME:
            raise self._error(f"{what}: a name of {len(data)} bytes")
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"{what}: the name {data[:40]!r} is not UTF-8") from None


def all_finite(values: np.ndarray) -> bool:
    """Whether every value is finite. One sum decides nearly always: it cannot be finite if an element is not."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.add.reduce(values, axis=None)) or np.isfinite(values).all())


def _kind(value: Any) -> str:
    return "an array" if isinstance(value, GGUFArray) else f"{value!r:.40}"
