"""ParallelDraftRunner: a draft model that makes all tokens of a draft in one pass (PARD: An et al. 2025).

    token_ids  | known tokens ... | mask mask ... |        depth - 1 masks
    drafts                      1   2    3 ...             what the model makes of each position

The model was tuned to see the mask token, which its config.json names, as a token that it has yet to guess. What it
computed at masks is never kept: the next call overwrites it.
"""

from __future__ import annotations

import time

import numpy as np

from headrace.attention.base import AttentionBackend
from headrace.core.kv_layout import KVLayout
from headrace.core.plan import DraftPass
from headrace.models.blocks import CausalLM
from headrace.ops.xp import Array
from headrace.spec.base import DraftContext
from headrace.spec.draft_runner import DraftRunner


def check_mask_token(mask_token: int, vocab_size: int) -> None:
    """ValueError if a draft model of `vocab_size` tokens has no such token."""
    if not 0 <= mask_token < vocab_size:
        raise ValueError(f"the mask token {mask_token} is not one of the {vocab_size} of the draft model")


class ParallelDraftRunner(DraftRunner):
    """See DraftRunner; the first step of a call runs the model, the others read what it made."""

    def __init__(
        self,
        model: CausalLM,
        layout: KVLayout,
        backend: AttentionBackend,
        num_rows: int,
        max_len: int,
        mask_token: int,
    ):
        """ValueError if the model has no such token."""
        check_mask_token(mask_token, model.spec.vocab_size)
        super().__init__(model, layout, backend, num_rows, max_len)
        self._mask_token = mask_token
        self._known: dict[int, int] = {}  # row -> known tokens
        self._depths: dict[int, int] = {}
        self._logits: dict[int, Array] = {}  # row -> [depth, V]

    def begin(self, context: DraftContext, most: int) -> tuple[np.ndarray, np.ndarray]:
        """See DraftFollower."""
        chosen, depths = super().begin(context, most)
        rows = context.rows[chosen]
        self._known = dict(zip(rows.tolist(), context.num_tokens[rows].tolist(), strict=True))
        self._depths = dict(zip(rows.tolist(), depths.tolist(), strict=True))
        self._logits = {}
        return chosen, depths

    def step(self, rows: np.ndarray, ends: np.ndarray) -> Array:
        """See DraftRunner."""
        if not self._logits:
            self._guess(rows, ends)
        return np.stack(
            [self._logits[row][end - self._known[row]] for row, end in zip(rows.tolist(), ends.tolist(), strict=True)]
        )

    def _guess(self, rows: np.ndarray, known: np.ndarray) -> None:
        """Logits of every place of every row's draft, in one pass."""
        started = time.perf_counter()
        depths = np.array([self._depths[row] for row in rows.tolist()], np.int32)
        for row, start, depth in zip(rows.tolist(), known.tolist(), depths.tolist(), strict=True):
            self._table.token_ids[row, start : start + depth - 1] = self._mask_token
        lengths = known + depths - 1 - self._table.num_computed[rows]
        hidden, _ = self._run(rows, lengths)
        self._table.num_computed[rows] = known
        ends = np.cumsum(lengths)
        places = [np.arange(end - depth, end) for end, depth in zip(ends, depths, strict=True)]
        logits = self.model.logits(hidden[np.concatenate(places)])
        self._logits = dict(zip(rows.tolist(), np.split(logits, np.cumsum(depths)[:-1]), strict=True))
        most = int(depths.max())
        seconds = (time.perf_counter() - started) / most  # a place's share, as the other networks have a pass a place
        self.passes += [DraftPass(int(np.count_nonzero(depths > place)), seconds) for place in range(most)]
