"""SafetensorsFolder: the tensors of a Hugging Face folder, one model.safetensors or shards with an index, over mmap.

Layout of a file: u64 length of the header, a JSON header {name: dtype, shape, data_offsets}, the data. The safetensors
library checks a file when it is opened (offsets that overlap, leave gaps or pass the end); tensors are then read here,
because numpy has no bfloat16 for the library to return.

Source: the format's description in huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import mmap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.loading.errors import CheckpointError
from headrace.loading.json_file import read_json

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
    "BF16": "<u2",  # the upper half of a float32
}


class _Shard:
    """One file: `tensors` maps a name to (dtype, shape, start, end), offsets from the start of the file."""

    def __init__(self, path: Path):
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            with safe_open(str(path), framework="numpy"):
                pass
            with open(path, "rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: is not a sound safetensors file ({error}); fetch it again") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
        length = int.from_bytes(self.map[:8], "little")
        header = json.loads(self.map[8 : 8 + length])
        header.pop("__metadata__", None)
        self.tensors: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            self.tensors[name] = (entry["dtype"], tuple(entry["shape"]), 8 + length + start, 8 + length + end)


class SafetensorsFolder:
    """The tensors of every shard in a folder. `read` gives float32; CheckpointError names the file or tensor."""

    def __init__(self, folder: str | Path, single: str = SINGLE_NAME):
        """`single` is the file's name where there is no index."""
        self.folder = Path(folder)
        self._shards = [_Shard(path) for path in _shard_paths(self.folder, single)]
        self._home: dict[str, _Shard] = {}
        for shard in self._shards:
            for name in shard.tensors:
                if name in self._home:
                    raise CheckpointError(f"{shard.path}: tensor {name!r} is in {self._home[name].path.name} as well")
                self._home[name] = shard
        self.num_bytes = sum(len(shard.map) for shard in self._shards)

    def names(self) -> list[str]:
        return list(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shard(name).tensors[name][1]

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32; read-only where it is stored so."""
        values, dtype = self._stored(name)
        if dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return np.require(values.astype(np.float32, copy=False), requirements=["C", "A"])

    def dtype(self, name: str) -> str:
        """Its dtype in the file, in the format's words: a key of DTYPES, or another that is not read."""
        return self._shard(name).tensors[name][0]

    def raw(self, name: str) -> np.ndarray:
        """The tensor as it lies in the file, read-only; BF16 as uint16."""
        return self._stored(name)[0]

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Write the tensor into `target`, which may be a GPU's and of another dtype, without a float32 copy."""
        values, dtype = self._stored(name)
        target.copy_(_as_torch(values, dtype))

    def read_rows(self, name: str, first: int, target: torch.Tensor) -> None:
        """Write rows of the tensor, from `first` on, into `target` [N, K]; a row is the last dimension."""
        values, dtype = self._stored(name)
        rows = values.reshape(-1, values.shape[-1])[first : first + target.shape[0]]
        self._expect(name, rows)
        target.copy_(_as_torch(rows, dtype))

    def _expect(self, name: str, part: np.ndarray) -> None:
        """The system may begin to read a part of a file that is about to be copied."""
        if hasattr(mmap, "MADV_WILLNEED"):
            shard = self._shard(name)
            whole = np.frombuffer(shard.map, np.uint8)
            start = part.ctypes.data - whole.ctypes.data
            begin = start // mmap.PAGESIZE * mmap.PAGESIZE
            shard.map.madvise(mmap.MADV_WILLNEED, begin, start + part.nbytes - begin)

    def _stored(self, name: str) -> tuple[np.ndarray, str]:
        """The tensor as it lies in the file, and its dtype there."""
        shard = self._shard(name)
        dtype, shape, start, end = shard.tensors[name]
        stored = DTYPES.get(dtype)
        if stored is None:
            raise CheckpointError(f"{shard.path}: tensor {name!r} has dtype {dtype}, which is not supported")
        count = math.prod(shape)
        if count * np.dtype(stored).itemsize != end - start:
            raise CheckpointError(f"{shard.path}: tensor {name!r} {list(shape)} {dtype} does not fit its bytes")
        return np.frombuffer(shard.map, stored, count, start).reshape(shape), dtype

    def _shard(self, name: str) -> _Shard:
        if name not in self._home:
            raise CheckpointError(f"{self.folder}: has no tensor {name!r}")
        return self._home[name]


def _as_torch(values: np.ndarray, dtype: str) -> torch.Tensor:
    """The same memory as a tensor."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the file's pages are read-only, and nothing here writes
        stored = torch.from_numpy(values.view(np.int16) if dtype == "BF16" else values)
    return stored.view(torch.bfloat16) if dtype == "BF16" else stored


def _shard_paths(folder: Path, name: str) -> list[Path]:
    """The files that make up the model. File names in an index are data: only plain names in the folder are read."""
    index = folder / INDEX_NAME
    if not index.is_file():
        single = folder / name
        if single.is_file():
            return [single]
        raise CheckpointError(f"{folder}: has no {name} and no {INDEX_NAME}; only safetensors weights are read")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if name != Path(name).name or "\\" in name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {name!r} is not the name of a file in this folder; refused")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: {len(missing)} of {len(names)} shards are missing: {', '.join(missing[:5])}")
    return [folder / name for name in names]
