"""StateRunner: heads that begin at the model's last hidden state and draft one after the other, as a chain of their
best tokens (models/medusa.py, models/mlp_speculator.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from headrace.core.plan import Admit, DraftPass
from headrace.ops.xp import Array
from headrace.spec.base import DraftContext, StepFeatures


class StateHeads(Protocol):
    """Heads of one model."""

    @property
    def num_heads(self) -> int: ...

    @property
    def weight_bytes(self) -> int:
        """Bytes that a pass of one head reads, on average."""
        ...

    def draft(self, head: int, states: Array, token_ids: Array) -> tuple[Array, Array]:
        """(logits float32 [R, V], states for the next head) by head 0, 1 ... of states [R, ...], which are the model's
        last hidden states [R, H] for head 0, and the tokens [R] drawn last."""
        ...


class StateRunner:
    """The same calls as DraftRunner has. It has no cache: all it needs of a row is one hidden state, that of the last
    token that the model has run; the model's own head drew the token behind it, head 0 drafts the next."""

    def __init__(self, heads: StateHeads):
        self.model = heads
        self.passes: list[DraftPass] = []
        self._context: DraftContext | None = None
        self._states: dict[int, tuple[int, Array]] = {}  # row -> (position, hidden state [H])
        self._made: dict[int, Array] = {}  # row -> what its last head left for the next

    def admit(self, admits: Sequence[Admit]) -> None:
        """See Proposer."""
        self.release([admit.row for admit in admits])

    def release(self, rows: Sequence[int]) -> None:
        """See Proposer."""
        for row in rows:
            self._states.pop(row, None)

    def begin(self, context: DraftContext, most: int) -> tuple[np.ndarray, np.ndarray]:
        """See DraftRunner."""
        self.passes = []
        self._made = {}
        if context.features is not None:
            self._keep(context.features)
        chosen, depths = [], []
        for index, (row, limit) in enumerate(zip(context.rows.tolist(), context.limits, strict=True)):
            known = int(context.num_tokens[row])
            depth = min(limit, most, self.model.num_heads, context.token_ids.shape[1] - known)
            if depth > 0 and self._states.get(row, (-1,))[0] == known - 2:
                chosen.append(index)
                depths.append(depth)
        self._context = context
        return np.array(chosen, np.int64), np.array(depths, np.int32)

    def step(self, rows: np.ndarray, ends: np.ndarray) -> Array:
        """See DraftRunner; all rows are at the same head."""
        assert self._context is not None
        started = time.perf_counter()
        head = int(ends[0] - self._context.num_tokens[rows[0]])
        states = [self._made[row] if head else self._states[row][1] for row in rows.tolist()]
        logits, made = self._run(head, states, self._context.token_ids[rows, ends - 1])
        self._made = dict(zip(rows.tolist(), made, strict=True))
        self.passes.append(DraftPass(len(rows), time.perf_counter() - started))
        return logits

    def end(self, rows: np.ndarray, drafts: np.ndarray) -> None:
        """See DraftRunner."""

    def check(self) -> None:
        """There is no pool to account for."""

    def watch(self, features: StepFeatures, num_tokens: np.ndarray) -> None:
        """Keep what a step made, after which nobody is asked for drafts."""
        self._keep(features)

    def _run(self, head: int, states: Sequence[Array], token_ids: np.ndarray) -> tuple[np.ndarray, Array]:
        """See StateHeads."""
        logits, made = self.model.draft(head, np.stack(states), np.ascontiguousarray(token_ids))
        return np.asarray(logits), made

    def _taken(self, values: Array, index: np.ndarray) -> Array:
        """Hidden states [N, H] of their own, of a step's [T, H], which will be overwritten."""
        return np.array(values[index], np.float32)

    def _keep(self, step: StepFeatures) -> None:
        """The hidden state of each span's last token that stands."""
        found: list[tuple[int, int, int]] = []  # row, position, token
        for row, start, first, end in zip(
            step.rows.tolist(), step.starts.tolist(), step.query_start[:-1].tolist(), step.query_start[1:].tolist(),
            strict=True,
        ):  # fmt: skip
            count = min(end - first, int(step.num_computed[row]) - start)
            if count > 0:
                found.append((row, start + count - 1, first + count - 1))
        if found:
            states = self._taken(step.values, np.array([token for _, _, token in found]))
            self._states.update((row, (position, own)) for (row, position, _), own in zip(found, states, strict=True))
