"""An EAGLE head on a GPU: it continues the features that a step of the model left in its buffer.

Where all rows are up to date and draft equally deep, the head's passes are sent behind the step that verifies, before
anybody knows what that accepted: the GPU reads it from the tables itself (ops/triton/follow.py), and the host, which
waits for the step's tokens meanwhile, waits once. All else is looked at when the tokens are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.core.kv_layout import KVLayout
from headrace.core.plan import Admit, NewBlocks
from headrace.layers.attention import Attend
from headrace.models.draft_heads import EagleHead
from headrace.ops.xp import Array
from headrace.spec.base import DraftContext, StepFeatures
from headrace.spec.eagle import HeadFollower, HeadRow

if TYPE_CHECKING:
    from headrace.worker.device_chain import Chained
    from headrace.worker.device_networks import Passes


def follow_depth(lengths: np.ndarray, limits: np.ndarray, num_runs: int) -> int:
    """Drafts that a chain can make behind a step of spans of `lengths` [S] tokens where at most `limits` [S] are
    wanted, or, of several runs, as many as the next one verifies; 0: they are not the same for all."""
    depths = lengths - 1 if num_runs > 1 else limits
    depth = int(depths[0])
    return depth if (depths == depth).all() and (depth <= limits).all() else 0


class HeadModel:
    """A head as a model: the features of a pass are read from a buffer, and those that it made left in another."""

    taps: tuple[int, ...] = ()

    def __init__(self, head: EagleHead, max_tokens: int, device: torch.device):
        self.head, self.spec, self.attention_layers = head, head.spec, head.attention_layers
        self.weight_bytes, self.vocab_size = head.weight_bytes, head.spec.vocab_size
        shape = (max_tokens, head.spec.hidden_size)
        self.inputs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.outputs = torch.zeros(shape, dtype=torch.float32, device=device)

    def forward(self, token_ids: Array, positions: Array, attend: Attend) -> Array:
        """Hidden states [T, H] for `logits`."""
        count = token_ids.shape[0]
        made, hidden = self.head.forward(token_ids, self.inputs[:count], positions, attend)
        self.outputs[:count].copy_(made)
        return hidden

    def logits(self, hidden: Array) -> Array:
        """float32 [L, V]"""
        return self.head.logits(hidden)

    def carry(self, count: int, last: torch.Tensor | None) -> None:
        """See ChainRunner: the feature that each of `count` rows made becomes the next one it continues."""
        self.inputs[:count].copy_(self.outputs[:count] if last is None else self.outputs[last[:count]])


class DeviceHeadRunner(HeadFollower):
    """An EAGLE head on the GPU.

    Features are kept as (tensor, first, count): of the step that ran last they lie in the model's own buffer, and what
    the head does not take of them at once is gathered into a tensor of its own before the next step.
    """

    def __init__(self, model: HeadModel, passes: Passes, layout: KVLayout, max_len: int):
        super().__init__(layout, passes.table.host, min(max_len, model.spec.max_position))
        self.model = model
        self.sender = passes
        self._live: torch.Tensor | None = None  # the model's buffer

    def admit(self, admits: Sequence[Admit]) -> None:
        """See Proposer."""
        super().admit(admits)
        self.sender.admit([replace(admit, token_ids=[0], prompt_len=1, num_computed=0) for admit in admits])

    def begin(self, context: DraftContext, most: int) -> tuple[np.ndarray, np.ndarray]:
        """See DraftFollower."""
        self._live = None if context.features is None else context.features.values
        return super().begin(replace(context, nodes=0), most)  # what is drafted is a chain, with others beside it

    def watch(self, features: StepFeatures, num_tokens: np.ndarray) -> None:
        """See HeadFollower; they may lie in the model's buffer."""
        self._live = features.values
        super().watch(features, num_tokens)
        self.settle()

    def chain(self, rows: np.ndarray, depths: np.ndarray) -> Chained:
        """See DeviceDraftRunner."""
        counts = np.array([self._rows[row].num_kept for row in rows.tolist()], np.int32)
        self._feed(rows, counts)
        return self.sender.chain(rows, counts, depths, int(depths[0]) + 1)

    def follow(
        self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, limits: np.ndarray, num_runs: int
    ) -> int:
        """Send a chain behind a step of spans [S] from `starts` on that verify all but their first token, for at most
        `limits` [S] drafts, in the first of `num_runs` runs. How many passes it has; 0: drafts cannot be made before it
        is known what is accepted, or not between runs."""
        depth = follow_depth(lengths, limits, num_runs)
        if not depth:
            return 0
        for number, start, length in zip(rows.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            row = self._rows.get(number)
            if row is None or row.num_kept or not row.fed or row.base + row.fed != start:
                return 0
            entries = start + num_runs * length - row.base  # at most
            if entries + depth > self._max_len or not self._allocate(row, entries + depth - 1):
                return 0
        return depth if self.sender.follow(rows, lengths, depth) else 0

    def take_followed(self, rows: np.ndarray, num_tokens: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """A chain has followed a step after which rows have `num_tokens` [max rows] tokens: whether
        each had something to go on from, bool [R]."""
        own = [self._rows[number] for number in rows.tolist()]
        fed = np.array([row.fed for row in own], np.int32)
        known = num_tokens[rows] - 1 - np.array([row.base for row in own], np.int32)
        for row, count in zip(own, known.tolist(), strict=True):
            row.fed = count
        self._table.num_computed[rows] = known
        return known > fed

    def settle(self) -> None:
        """Features that were not taken leave the model's buffer."""
        live = self._live
        kept = [
            (row, place, piece)
            for row in self._rows.values()
            for place, piece in enumerate(row.features)
            if piece[0] is live
        ]
        if live is None or not kept:
            return
        index = np.concatenate([np.arange(first, first + count) for _, _, (_, first, count) in kept])
        own = live[torch.from_numpy(index).to(live.device, non_blocking=True)]
        at = 0
        for row, place, (_, _, count) in kept:
            row.features[place] = own, at, count
            at += count

    def _cut(self, values: Array, first: int, count: int) -> tuple[torch.Tensor, int, int]:
        return values, first, count

    def _catch_up(self, row: HeadRow) -> None:
        number, limit = np.array([row.request.row]), self.model.inputs.shape[0]
        while row.num_kept > self._near:
            count = np.array([min(row.num_kept - 1, limit)], np.int32)
            self._feed(number, count)
            self.sender.send(number, count, yields=False)

    def _feed(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """Make the next `counts` entries of rows ready to be run: features into the buffer, tokens into the table."""
        table, pieces = self.sender.table, []
        own = [self._rows[number] for number in rows.tolist()]
        fed = np.array([row.fed for row in own], np.int32)
        table.host.num_computed[rows], table.host.num_tokens[rows] = fed, fed + counts
        table.send_many(rows, fed, counts)
        table.send_all_progress(rows)
        for row, count in zip(own, counts.tolist(), strict=True):
            if not row.fed:  # the entries begin anew
                table.send_shift(row.request.row, row.base + 1)
            pieces += _taken(row, count)
        source = pieces[0][0]
        if all(piece[0] is source for piece in pieces):
            index = np.concatenate([np.arange(first, first + count) for _, first, count in pieces])
            values = source[torch.from_numpy(index).to(source.device, non_blocking=True)]
        else:
            values = torch.cat([tensor[first : first + count] for tensor, first, count in pieces])
        self.model.inputs[: values.shape[0]].copy_(self.model.head.fuse(values))

    def _place(self, news: Sequence[NewBlocks]) -> None:
        self.sender.place(news)


def _taken(row: HeadRow, count: int) -> list[Any]:
    """The pieces of the row's next `count` features, which are fed from now on."""
    row.num_kept -= count
    row.fed += count
    taken = []
    while count:
        tensor, first, size = row.features[0]
        part = min(size, count)
        taken.append((tensor, first, part))
        row.features[:1] = [(tensor, first + part, size - part)] if part < size else []
        count -= part
    return taken
