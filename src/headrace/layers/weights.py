"""WeightSource: how layers get their weights, by the tensor names that Hugging Face checkpoints use.

Layers take what they need while they are built; nothing is loaded that no layer asked for. Problems are collected,
so that one error names every missing, misshapen and unused tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headrace.ops.xp import Array

if TYPE_CHECKING:
    from headrace.ops.native.packed import StoredTensor


class WeightsError(ValueError):
    """The checkpoint's tensors do not fit the model; the message names them."""


class Checkpoint(Protocol):
    """Named tensors of a model on disk (loading/), or made up (loading/dummy.py). Names are Hugging Face's."""

    def names(self) -> Iterable[str]:
        """Every tensor in the checkpoint."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, in Hugging Face's orientation (linear weights are [out, in])."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32, dequantised if need be."""
        ...

    # A checkpoint may also have `read_packed(name) -> StoredTensor | None`: the tensor as it is stored, where that is a
    # format that the native kernels read; `fill(name, target)`: write the tensor into one of a GPU's; and
    # `read_rows(name, first, target)`: write some of its rows into a torch tensor [N, K], from any thread.


class Transfer(Protocol):
    """Brings tensors to a GPU while layers are built (worker/transfer.py)."""

    def add(self, read: Callable[[int, Any], None], target: Array) -> None:
        """Have `target` [..., K] filled by calls read(first, part), each of which writes the rows from `first` on into
        a `part` [N, K] of its dtype."""
        ...


class WeightSource:
    """Hands a checkpoint's tensors to layers and keeps account of what was taken, missing and misshapen."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        place: Callable[[np.ndarray], Array] | None = None,
        transfer: Transfer | None = None,
    ):
        """`place` puts a small tensor (norm, bias) where the model computes; None: it stays. What `fill` is asked for
        is left to `transfer`, which ends after the layers are built; None: it is done at once."""
        self._checkpoint = checkpoint
        self._transfer = transfer
        self.place: Callable[[np.ndarray], Array] = place or (lambda array: array)
        self._names = frozenset(checkpoint.names())
        self._taken: set[str] = set()
        self._missing: list[str] = []
        self._misshapen: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor, float32; a problem is noted for `finish` and answered with zeros of `shape`."""
        if name not in self._names:
            self._missing.append(f"{name} {list(shape)}")
            return np.zeros(shape, np.float32)
        self._taken.add(name)
        if (found := tuple(self._checkpoint.shape(name))) != shape:
            self._misshapen.append(f"{name}: {list(found)} in the file, {list(shape)} expected")
            return np.zeros(shape, np.float32)
        return self._checkpoint.read(name)

    def take_stored(self, name: str, shape: tuple[int, int]) -> StoredTensor:
        """The matrix in the format it is stored in, for the native kernels; problems are noted as `take` does."""
        from headrace.ops.native.packed import stored_float32

        known = name in self._names and tuple(self._checkpoint.shape(name)) == shape
        if known and (read := getattr(self._checkpoint, "read_packed", None)) and (stored := read(name)) is not None:
            self._taken.add(name)
            return stored
        return stored_float32(self.take(name, shape))

    def take_stacked(self, name: str, shape: tuple[int, int, int]) -> list[StoredTensor]:
        """The E matrices of a tensor [E, N, K], each as `take_stored` gives one."""
        from headrace.ops.native.packed import StoredTensor, stored_float32

        count, rows, _ = shape
        known = name in self._names and tuple(self._checkpoint.shape(name)) == shape
        if known and (read := getattr(self._checkpoint, "read_packed", None)) and (stored := read(name)) is not None:
            self._taken.add(name)
            parts = [stored.rows[first : first + rows] for first in range(0, count * rows, rows)]
            releases = [None] * (count - 1) + [stored.release]  # they are packed in this order
            return [StoredTensor(stored.format, part, None, let) for part, let in zip(parts, releases, strict=True)]
        return [stored_float32(each) for each in self.take(name, shape)]

    def fill(self, name: str, target: Array) -> None:
        """Write the tensor into `target`, of the shape expected and in a GPU's memory; problems are noted as `take`
        does."""
        shape = tuple(target.shape)
        known = name in self._names and tuple(self._checkpoint.shape(name)) == shape
        read_rows = getattr(self._checkpoint, "read_rows", None)
        if known and self._transfer is not None and read_rows is not None:
            self._taken.add(name)
            self._transfer.add(partial(read_rows, name), target)
        elif known and (fill := getattr(self._checkpoint, "fill", None)) is not None:
            self._taken.add(name)
            fill(name, target)
        else:
            from torch import from_numpy

            values = self.take(name, shape)
            target.copy_(from_numpy(values if values.flags.writeable else values.copy()))

    def ignore(self, name: str) -> None:
        """Mark a tensor as known and not needed (rotary inverse frequencies, a tied head's copy)."""
        self._taken.add(name)

    def finish(self) -> None:
        """Raise WeightsError if anything was missing, misshapen or left over."""
        problems = []
        for title, names in (
            ("missing", self._missing),
            ("of another shape", self._misshapen),
            ("not part of this model", sorted(self._names - self._taken)),
        ):
            if names:
                shown = "; ".join(names[:8]) + (f"; and {len(names) - 8} more" if len(names) > 8 else "")
                problems.append(f"{len(names)} tensors {title}: {shown}")
        if problems:
            where = getattr(self._checkpoint, "path", None)
            what = "the checkpoint" if where is None else f"{where}: the checkpoint"
            raise WeightsError(f"{what} does not fit the model: {'. '.join(problems)}")
