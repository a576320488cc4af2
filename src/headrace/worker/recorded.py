"""RecordedLauncher: steps of up to a chunk of a prompt as one native call each, once their shape has been seen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.ops.native.library import library
from headrace.ops.native.recording import Recording, record
from headrace.worker.batch import StepBatch
from headrace.worker.launcher import EagerLauncher, Forward

MAX_TOKENS = 256  # a whole chunk of a prompt: calls from Python cost it some hundredths of its time, more on AMX
MAX_PROGRAMS = 48  # shapes kept; the one that was not used for longest goes
MAX_KEPT_TOKENS = 1024  # tokens of all shapes kept, which bounds the memory of their buffers
EAGER_STEPS, SMALL = 2, 32  # steps of a shape before it is worth recording; tokens up to which one is at once


@dataclass(frozen=True)
class Program:
    """A recorded step: where its inputs go, and where its hidden states come out."""

    recording: Recording
    token_ids: np.ndarray
    positions: np.ndarray
    metas: list[Any]
    hidden: Any

    def run(self, batch: StepBatch, metas: Any) -> Any:
        """Hidden states of another step of the same shape; None if it does not fit."""
        if int(batch.positions.max()) >= self.recording.position_limit:
            return None
        if not all(own.refill(meta) for own, meta in zip(self.metas, metas, strict=True)):
            return None
        self.token_ids[:], self.positions[:] = batch.token_ids, batch.positions
        self.recording.replay()
        return self.hidden


class RecordedLauncher:
    """Calls the model, and replays what it did where a step of the same shape comes again."""

    def __init__(self, forward: Forward):
        self._forward = forward
        self._eager = EagerLauncher(forward)
        self.pick = self._eager.pick
        self._programs: dict[tuple[int, int, bool], Program] = {}
        self._seen: dict[tuple[int, int, bool], int] = {}
        self._refused = False  # the model does something that cannot be recorded
        self.warming = False  # the last step was one of the first of its shape, and not replayed as later ones are

    def run(self, batch: StepBatch, metas: Any) -> Any:
        """See Launcher."""
        self.warming = False
        recordable = not self._refused and 0 < batch.num_tokens <= MAX_TOKENS
        if not recordable or not all(hasattr(meta, "refill") for meta in metas):
            return self._eager.run(batch, metas)
        key = (batch.num_tokens, batch.num_spans, batch.parents is not None)
        if (program := self._programs.pop(key, None)) is not None:
            hidden = program.run(batch, metas)
            if hidden is not None:
                self._programs[key] = program  # last used: at the end
                return hidden
        self._seen[key] = self._seen.get(key, 0) + 1
        # of a shape that had to go, to be recorded again is what such steps take
        self.warming = self._seen[key] <= (1 if batch.num_tokens <= SMALL else EAGER_STEPS + 1)
        if batch.num_tokens > SMALL and self._seen[key] <= EAGER_STEPS:
            return self._eager.run(batch, metas)
        return self._record(key, batch, metas)

    def _record(self, key: tuple[int, int, bool], batch: StepBatch, metas: Any) -> Any:
        token_ids, positions = np.array(batch.token_ids, np.int32), np.array(batch.positions, np.int32)
        fixed = [meta.fixed() for meta in metas]
        own = replace(batch, token_ids=token_ids, positions=positions)
        hidden, recording = record(library().functions, lambda: self._forward(own, fixed))
        if recording is None:
            self._refused, self.warming = True, False
            return hidden
        self._programs[key] = Program(recording, token_ids, positions, fixed, hidden)
        while len(self._programs) > MAX_PROGRAMS or sum(tokens for tokens, *_ in self._programs) > MAX_KEPT_TOKENS:
            del self._programs[next(iter(self._programs))]
        return hidden
