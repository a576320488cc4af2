"""Sampling settings of every row of the request table, as columns, and a step's view of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.core.plan import Admit
from headrace.ops.xp import Array

_COOLEST = 1e-20  # lower temperatures are this one: a difference of 1e-17 logits then already decides


class SamplingTable:
    """One column per setting, one entry per row; written at admission."""

    def __init__(self, max_rows: int):
        self.temperature = np.zeros(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int32)
        self.top_p = np.ones(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.seed = np.zeros(max_rows, np.int64)
        self.choice = np.zeros(max_rows, np.int64)
        self.first_free = np.zeros(max_rows, np.int32)  # position from which stop tokens are allowed
        self.stop_ids: list[frozenset[int]] = [frozenset()] * max_rows

    def set(self, admit: Admit) -> None:
        """Take over a request's settings."""
        row, params = admit.row, admit.params
        self.temperature[row] = params.temperature and max(params.temperature, _COOLEST)
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = admit.seed
        self.choice[row] = admit.choice
        self.first_free[row] = admit.prompt_len + params.min_tokens
        self.stop_ids[row] = admit.stop_ids


@dataclass(frozen=True)
class SamplingBatch:
    """What the stages and the draw know of L rows of logits."""

    table: SamplingTable
    rows: Array  # int32 [L]  row of the request table
    positions: Array  # int32 [L]  position in its sequence of the token to be drawn
