"""DeviceTable: the request table of a GPU, and the host's copy of what it last knew.

The GPU's table is what steps read and write: with steps in flight only it knows a row's last token. The host sends
changes as patches (ops/triton/step.py). The copy here is right for rows that the host draws for, whose steps are never
in flight, and for all rows of an engine that speculates, which waits for every step; of others it holds what they were
admitted with.
"""

from __future__ import annotations

from array import array
from enum import Enum

import numpy as np
import torch

from headrace.core.plan import Admit, StepPlan
from headrace.ops.triton.step import (
    CHOICE,
    COMPUTED,
    KNOWN,
    MIN_P,
    RECORD,
    SEED,
    SHIFT,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TableView,
)
from headrace.worker.table import RequestTable

_LOW = 2**31 - 1
_FEW = 4  # rows that are told of one by one in less time than in columns


class Patches:
    """Segments to be copied into the table, and their words."""

    def __init__(self) -> None:
        self._segments, self._words = array("i"), array("i")

    def add(self, target: int, words: np.ndarray) -> None:
        """`words` int32, as they are now, to be written from `target` on."""
        self._segments.extend((target & _LOW, target >> 31, len(self._words), len(words)))
        self._words.frombytes(words.tobytes())

    def add_many(self, targets: np.ndarray, lengths: np.ndarray, words: np.ndarray) -> None:
        """The first lengths[0] of `words` int32, to be written from targets[0] on, then the next ones: `targets` int64
        [N], `lengths` [N]."""
        segments = np.empty((len(targets), 4), np.int32)
        segments[:, 0], segments[:, 1], segments[:, 3] = targets & _LOW, targets >> 31, lengths
        segments[:, 2] = np.cumsum(lengths) - lengths + len(self._words)
        self._segments.frombytes(segments.tobytes())
        self._words.frombytes(words.tobytes())

    def take(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(segments int32 [S, 4], words int32 [W]) gathered so far, which are forgotten; None: nothing."""
        if not self._segments:
            return None
        taken = np.frombuffer(self._segments, np.int32).reshape(-1, 4), np.frombuffer(self._words, np.int32)
        self._segments, self._words = array("i"), array("i")
        return taken


class Hosts(Enum):
    """Which rows the host draws for."""

    NONE = "none"
    ODD = "odd"  # those with options that no kernel knows
    WARM = "warm"  # those, and all that have a temperature


class DeviceTable:
    """Rows on the GPU (`view`) and on the host (`host`)."""

    def __init__(
        self,
        max_rows: int,
        max_len: int,
        num_groups: int,
        block_size: int,
        device: torch.device,
        hosts: Hosts = Hosts.ODD,
        stream: int = 0,
    ):
        """`hosts`: the rows whose tokens the host draws. `stream`: of the noise of the others (see SamplingBatch)."""
        self._hosts, self._stream = hosts, stream
        self.view = TableView.create(max_rows, max_len, block_size, num_groups, device)
        self.host = RequestTable(max_rows, max_len, num_groups, block_size)
        self.patches = Patches()
        # rows whose tokens the host draws: options that no kernel knows
        self.hosted = np.zeros(max_rows, bool)
        self.warm = np.zeros(max_rows, bool)
        self.cut = np.zeros(max_rows, bool)

    def apply(self, plan: StepPlan) -> None:
        """Take in what the scheduler decided; the GPU learns it with the next patches.

        A row may change hands twice in a plan, so what is sent is how the host's copy stands after all of it.
        """
        if not (plan.admits or plan.forks or plan.new_blocks):
            return
        self.host.apply(plan)
        for admit in plan.admits:
            self._classify(admit)
        for row in dict.fromkeys([admit.row for admit in plan.admits] + [fork.row for fork in plan.forks]):
            self._send_row(row)
        grown: dict[tuple[int, int], tuple[int, int]] = {}
        for row, group, start, ids in plan.new_blocks:
            end, known = start + len(ids), grown.get((group, row))
            grown[group, row] = (start, end) if known is None else (min(known[0], start), max(known[1], end))
        tables, size = self.host.block_tables, self.view.max_blocks
        at = [self.view.blocks_at(group) for group in range(len(tables))]
        for (group, row), (first, end) in grown.items():
            self.patches.add(at[group] + row * size + first, tables[group][row, first:end])

    def advance(self, plan: StepPlan) -> None:
        """The spans of rows that the host draws for are computed."""
        rows = plan.rows
        mine = self.hosted[rows]
        self.host.num_computed[rows[mine]] += plan.lengths[mine]

    def commit_hosted(self, row: int, token: int) -> None:
        """A token that the host drew: the GPU learns it with the next patches."""
        host = self.host
        at = min(int(host.num_tokens[row]), self.view.max_len - 1)
        host.token_ids[row, at] = token
        host.num_tokens[row] += 1
        self.send_tokens(row, at, at + 1)
        self.patches.add(row * RECORD + KNOWN, host.num_tokens[row : row + 1])

    def send_tokens(self, row: int, first: int, end: int) -> None:
        """The GPU learns tokens first .. end-1 of a row, as the host has them, with the next patches."""
        if end > first:
            self.patches.add(self.view.tokens_at + row * self.view.max_len + first, self.host.token_ids[row, first:end])

    def send_many(self, rows: np.ndarray, firsts: np.ndarray, counts: np.ndarray) -> None:
        """`send_tokens` of rows [N], counts[i] from firsts[i] on, which may be none."""
        if len(rows) <= _FEW:
            for row, first, count in zip(rows.tolist(), firsts.tolist(), counts.tolist(), strict=True):
                self.send_tokens(row, first, first + count)
            return
        span, column = (np.arange(int(counts.max())) < counts[:, None]).nonzero()
        words = self.host.token_ids[rows[span], firsts[span] + column]
        targets = self.view.tokens_at + rows.astype(np.int64) * self.view.max_len + firsts
        self.patches.add_many(targets, counts, words)

    def send_all_progress(self, rows: np.ndarray) -> None:
        """`send_progress` of rows [N]."""
        if len(rows) <= _FEW:
            for row in rows.tolist():
                self.send_progress(row)
            return
        words = np.stack([self.host.num_tokens[rows], self.host.num_computed[rows]], axis=1)
        self.patches.add_many(rows.astype(np.int64) * RECORD + KNOWN, np.full(len(rows), 2), words)

    def send_progress(self, row: int) -> None:
        """The GPU learns how many tokens of a row are known and computed."""
        host = self.host
        self.patches.add(row * RECORD + KNOWN, np.array([host.num_tokens[row], host.num_computed[row]], np.int32))

    def send_shift(self, row: int, shift: int) -> None:
        """The GPU learns a row's `shift` (ops/triton/step.py)."""
        self.patches.add(row * RECORD + SHIFT, np.array([shift], np.int32))

    def _classify(self, admit: Admit) -> None:
        row, params = admit.row, admit.params
        self.warm[row] = warm = params.temperature > 0
        odd = not params.is_simple or (warm and self._hosts is Hosts.WARM)
        self.hosted[row] = odd and self._hosts is not Hosts.NONE
        self.cut[row] = self.warm[row] and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)

    def _send_row(self, row: int) -> None:
        host, sampling = self.host, self.host.sampling
        record = np.zeros(RECORD, np.int32)
        record[KNOWN], record[COMPUTED] = host.num_tokens[row], host.num_computed[row]
        record[TOP_K] = sampling.top_k[row]
        for place, column in ((TEMPERATURE, sampling.temperature), (TOP_P, sampling.top_p), (MIN_P, sampling.min_p)):
            record[place] = column[row : row + 1].view(np.int32)[0]
        record[SEED : SEED + 2] = sampling.seed[row : row + 1].view(np.int32)
        choice = sampling.choice[row : row + 1] + (self._stream << 16)
        record[CHOICE : CHOICE + 2] = choice.view(np.int32)
        self.patches.add(row * RECORD, record)
        count = int(host.num_tokens[row])
        self.patches.add(self.view.tokens_at + row * self.view.max_len, host.token_ids[row, :count])
