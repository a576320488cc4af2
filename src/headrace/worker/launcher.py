"""Launcher: how the model's forward pass is started. Eager here; recorded programs and CUDA graphs plug in beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from headrace.worker.batch import ShapeKey, StepBatch

Forward = Callable[[StepBatch, Any], Any]  # hidden states [T, H], or what else a network makes of a batch


class Launcher(Protocol):
    """Chooses a shape for a step and runs the forward pass in it."""

    def pick(self, num_tokens: int, num_rows: int, query_len: int | None) -> ShapeKey:
        """The shape to build the batch in; `query_len` if every span has that length."""
        ...

    def run(self, batch: StepBatch, metas: Any) -> Any:
        """Hidden states [T, H] of the batch; `metas` is the attention metadata of each layer group."""
        ...


class EagerLauncher:
    """Calls the model, unpadded."""

    def __init__(self, forward: Forward):
        self._forward = forward

    def pick(self, num_tokens: int, num_rows: int, query_len: int | None) -> ShapeKey:
        return ShapeKey("eager", num_tokens, num_rows, query_len)

    def run(self, batch: StepBatch, metas: Any) -> Any:
        return self._forward(batch, metas)
