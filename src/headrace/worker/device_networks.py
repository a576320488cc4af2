"""Networks that draft on a GPU: a second model, or a head that continues the model's features.

Each has a table, a cache and graphs of its own (worker/device_runner.py), whose steps are its passes. A pass reads the
token that the one before drew from its table on the GPU, drawn there with the noise of (seed, choice, position), so the
host sends all passes of a draft at once and waits for the last. Rows whose options no kernel knows (penalties, bans, a
grammar) draft without them: their drafts are worse guesses, and verified as all are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headrace.attention.triton import TritonAttention
from headrace.config import EngineConfig
from headrace.core.kv_layout import KVLayout
from headrace.core.plan import Admit, DraftPass, NewBlocks, StepPlan
from headrace.layers.attention import Attend
from headrace.models.blocks import CausalLM
from headrace.models.draft_heads import EagleHead
from headrace.ops.xp import Array
from headrace.sampling.sampler import Sampler
from headrace.spec.base import DraftContext, Drafts
from headrace.spec.draft_runner import DraftFollower
from headrace.spec.eagle import HeadFollower, HeadRow
from headrace.worker.device_cache import DeviceKVCache
from headrace.worker.device_runner import DeviceRunner, PendingStep
from headrace.worker.device_table import DeviceTable

CATCH_UP = 2048  # tokens of prompts that rows may catch up with in one call


class CutModel:
    """A draft model whose logits are of the `vocab_size` tokens that the verifying model has, at most: checkpoints pad
    their vocabularies differently."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: CausalLM, vocab_size: int):
        self.spec, self.attention_layers, self.forward = model.spec, model.attention_layers, model.forward
        self.weight_bytes = model.weight_bytes
        self._model, self._vocab_size = model, vocab_size

    def logits(self, hidden: Array) -> Array:
        """float32 [L, V]"""
        logits = self._model.logits(hidden)
        return logits if logits.shape[1] <= self._vocab_size else logits[:, : self._vocab_size].contiguous()


class HeadModel:
    """A head as a model: the features of a pass are read from a buffer, and those that it made left in another."""

    taps: tuple[int, ...] = ()

    def __init__(self, head: EagleHead, max_tokens: int, device: torch.device):
        self.head, self.spec, self.attention_layers = head, head.spec, head.attention_layers
        self.weight_bytes = head.weight_bytes
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


class Passes:
    """A network's table, cache and runner: sends its passes."""

    def __init__(
        self,
        model: CutModel | HeadModel,
        layout: KVLayout,
        backend: TritonAttention,
        config: EngineConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens: int,
    ):
        most, rows = config.max_draft_tokens, config.max_num_seqs
        backend.reserve(layout.groups, model.spec.num_heads, rows, device, config.max_model_len)
        self.cache = DeviceKVCache(layout, dtype, device)
        self.table = DeviceTable(rows, config.max_model_len, len(layout.groups), layout.block_size, device, hosts=False)
        self._runner = DeviceRunner(
            model, self.cache, self.table, backend, Sampler([]), max_tokens, config.graphs,
            most_drafts=most, ring=most + 3,
        )  # fmt: skip

    def admit(self, admits: Sequence[Admit]) -> None:
        """Rows begin anew; the GPU is told at once, before they may change hands again."""
        self.table.apply(StepPlan(0, admits=tuple(admits)))
        self._runner.flush()

    def place(self, news: Sequence[NewBlocks]) -> None:
        """Rows get blocks; the GPU learns it with the next pass."""
        self.table.apply(StepPlan(0, new_blocks=tuple(news)))

    def send(self, rows: np.ndarray, lengths: np.ndarray, yields: bool = True) -> PendingStep:
        """Start a pass over each row's next tokens."""
        host = self.table.host
        spans = np.zeros((4, len(rows)), np.int32)
        spans[0], spans[1], spans[2] = rows, host.num_computed[rows], lengths
        pending = self._runner.execute(StepPlan(0, spans=spans, yields=np.full(len(rows), yields)))
        assert isinstance(pending, PendingStep)
        host.num_computed[rows] += lengths
        return pending

    def close(self) -> None:
        """See DeviceRunner."""
        self._runner.close()


class DeviceDraftRunner(DraftFollower):
    """A draft model on the GPU."""

    def __init__(self, model: CutModel, passes: Passes, layout: KVLayout, max_len: int):
        super().__init__(layout, passes.cache, passes.table.host, min(max_len, model.spec.max_position), CATCH_UP)
        self.model = model
        self.sender = passes
        self._sent: dict[int, int] = {}  # row -> known tokens that the GPU has

    def admit(self, admits: Sequence[Admit]) -> None:
        """See Proposer."""
        super().admit(admits)
        self.sender.admit(admits)
        self._sent.update((admit.row, len(admit.token_ids)) for admit in admits)

    def chain(self, rows: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """int32 [R, K] tokens drafted, -1 pads; `depths` [R] falls."""
        self._tell(rows)
        known = np.array([len(self._rows[row].request.token_ids) for row in rows.tolist()], np.int32)
        first = known - self._table.num_computed[rows]
        sent = []
        for column in range(int(depths[0])):
            going = rows[: np.count_nonzero(depths > column)]
            sent.append(self.sender.send(going, first if column == 0 else np.ones(len(going), np.int32)))
        return gather(sent, len(rows))

    def _tell(self, rows: np.ndarray) -> None:
        table = self.sender.table
        for number in rows.tolist():
            known = len(self._rows[number].request.token_ids)
            table.host.num_tokens[number] = known
            table.send_tokens(number, self._sent[number], known)
            table.send_progress(number)
            self._sent[number] = known

    def _place(self, news: Sequence[NewBlocks]) -> None:
        self.sender.place(news)

    def _run(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        self._tell(rows)
        self.sender.send(rows, lengths, yields=False)


class DeviceHeadRunner(HeadFollower):
    """An EAGLE head on the GPU.

    Features are kept as (tensor, first, count): of the step that ran last they lie in the model's own buffer, and what
    the head does not take of them at once is gathered into a tensor of its own before the next step.
    """

    def __init__(self, model: HeadModel, passes: Passes, layout: KVLayout, max_len: int, most_drafts: int):
        super().__init__(layout, passes.table.host, min(max_len, model.spec.max_position))
        self.model = model
        self.sender = passes
        self._near = most_drafts + 1  # entries that rows may be behind and run with their first draft
        self._live: torch.Tensor | None = None  # the model's buffer

    def admit(self, admits: Sequence[Admit]) -> None:
        """See Proposer."""
        super().admit(admits)
        self.sender.admit([replace(admit, token_ids=[0], prompt_len=1, num_computed=0) for admit in admits])

    def begin(self, context: DraftContext, most: int) -> tuple[np.ndarray, np.ndarray]:
        """See DraftFollower."""
        self._live = None if context.features is None else context.features.values
        return super().begin(context, most)

    def chain(self, rows: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """See DeviceDraftRunner."""
        counts = np.array([self._rows[row].num_kept for row in rows.tolist()], np.int32)
        inputs, outputs = self.model.inputs, self.model.outputs
        last = torch.from_numpy(np.cumsum(counts) - 1).to(inputs.device, non_blocking=True)
        self._feed(rows, counts)
        sent = [self.sender.send(rows, counts)]
        for column in range(1, int(depths[0])):
            going = np.count_nonzero(depths > column)
            inputs[:going].copy_(outputs[last[:going]] if column == 1 else outputs[:going])
            sent.append(self.sender.send(rows[:going], np.ones(going, np.int32)))
        return gather(sent, len(rows))

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

    def _feed_all_but_last(self, rows: list[HeadRow]) -> None:
        limit = self.model.inputs.shape[0]
        for row in rows:
            while row.num_kept > self._near:
                number, count = np.array([row.request.row]), np.array([min(row.num_kept - 1, limit)], np.int32)
                self._feed(number, count)
                self.sender.send(number, count, yields=False)

    def _feed(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """Make the next `counts` entries of rows ready to be run: features into the buffer, tokens into the table."""
        table, pieces = self.sender.table, []
        for number, count in zip(rows.tolist(), counts.tolist(), strict=True):
            row = self._rows[number]
            table.host.num_tokens[number] = row.fed + count
            table.host.num_computed[number] = row.fed
            table.send_tokens(number, row.fed, row.fed + count)
            table.send_progress(number, shift=row.base + 1)
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


def gather(sent: Sequence[PendingStep], num_rows: int) -> np.ndarray:
    """int32 [R, K]: what each pass drew for its first rows; -1 where it had no more of them."""
    tokens = np.full((num_rows, len(sent)), -1, np.int32)
    for column, drawn in enumerate([pending.drawn() for pending in sent]):
        tokens[: len(drawn), column] = drawn
    for column in range(1, len(sent)):  # nothing follows where nothing could be drawn
        tokens[tokens[:, column - 1] < 0, column] = -1
    return np.maximum(tokens, -1)


class DeviceDraftProposer:
    """A `Proposer` (spec/base.py) over a network on the GPU."""

    def __init__(self, runner: DeviceDraftRunner | DeviceHeadRunner, most_drafts: int):
        self.runner = runner
        self._most_drafts = most_drafts
        self.wants_features = isinstance(runner, DeviceHeadRunner)

    @property
    def weight_bytes(self) -> int:
        """Bytes that a pass reads."""
        return self.runner.model.weight_bytes

    @property
    def last_passes(self) -> tuple[DraftPass, ...]:
        """Passes of the last call of `propose`, with their seconds."""
        return tuple(self.runner.passes)

    def admit(self, admits: Sequence[Admit]) -> None:
        self.runner.admit(admits)

    def release(self, rows: Sequence[int]) -> None:
        self.runner.release(rows)

    def close(self) -> None:
        """Let go of the network and its cache."""
        self.runner.sender.close()

    @torch.inference_mode()
    def propose(self, context: DraftContext) -> Drafts | None:
        chosen, depths = self.runner.begin(context, self._most_drafts)
        drafts = self._draft(context, chosen, depths) if len(chosen) else None
        if isinstance(self.runner, DeviceHeadRunner):
            self.runner.settle()
        return drafts

    def _draft(self, context: DraftContext, chosen: np.ndarray, depths: np.ndarray) -> Drafts:
        started = time.perf_counter()
        order = np.argsort(-depths, kind="stable")  # rows that draft less are the last ones, and leave the chain early
        chosen, depths = chosen[order], depths[order]
        rows = context.rows[chosen]
        tokens = self.runner.chain(rows, depths)
        self.runner.end(rows, tokens)
        seconds = (time.perf_counter() - started) / int(depths[0])
        counts = [int(np.count_nonzero(depths > column)) for column in range(int(depths[0]))]
        self.runner.passes = [DraftPass(count, seconds) for count in counts]
        placed = np.full((len(context.rows), tokens.shape[1]), -1, np.int32)
        placed[chosen] = tokens
        return Drafts(placed)
