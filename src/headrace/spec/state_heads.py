"""MedusaRunner: heads that read the model's last hidden state (models/medusa.py), as a chain of their best tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from headrace.core.plan import Admit, DraftPass
from headrace.models.medusa import MedusaHeads
from headrace.ops.xp import Array
from headrace.spec.base import DraftContext, StepFeatures


class MedusaRunner:
    """The same calls as DraftRunner has. It has no cache: all it needs of a row is one hidden state, that of the last
    token that the model has run; the model's own head drew the token behind it, head 0 drafts the next."""

    def __init__(self, heads: MedusaHeads):
        self.model = heads
        self.passes: list[DraftPass] = []
        self._known = np.zeros(0, np.int32)
        self._states: dict[int, tuple[int, np.ndarray]] = {}  # row -> (position, hidden state [H])

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
        if context.features is not None:
            self._keep(context.features)
        chosen, depths = [], []
        for index, (row, limit) in enumerate(zip(context.rows.tolist(), context.limits, strict=True)):
            known = int(context.num_tokens[row])
            depth = min(limit, most, self.model.num_heads, context.token_ids.shape[1] - known)
            if depth > 0 and self._states.get(row, (-1,))[0] == known - 2:
                chosen.append(index)
                depths.append(depth)
        self._known = context.num_tokens
        return np.array(chosen, np.int64), np.array(depths, np.int32)

    def step(self, rows: np.ndarray, ends: np.ndarray) -> Array:
        """See DraftRunner; all rows are at the same head."""
        started = time.perf_counter()
        head = int(ends[0] - self._known[rows[0]])
        logits = self.model.logits(head, np.stack([self._states[row][1] for row in rows.tolist()]))
        self.passes.append(DraftPass(len(rows), time.perf_counter() - started))
        return logits

    def end(self, rows: np.ndarray, drafts: np.ndarray) -> None:
        """See DraftRunner."""

    def check(self) -> None:
        """There is no pool to account for."""

    def _keep(self, step: StepFeatures) -> None:
        """The hidden state of each span's last token that stands."""
        for row, start, first, end in zip(
            step.rows.tolist(), step.starts.tolist(), step.query_start[:-1].tolist(), step.query_start[1:].tolist(),
            strict=True,
        ):  # fmt: skip
            count = min(end - first, int(step.num_computed[row]) - start)
            if count > 0:
                self._states[row] = start + count - 1, np.array(step.values[first + count - 1], np.float32)
