"""Networks that draft on a GPU: a second model, or a head that continues the model's features.

Each has a table, a cache and graphs of its own (worker/device_runner.py), whose steps are its passes. A pass reads the
token that the one before drew from its table on the GPU, drawn there with the noise of (seed, choice, position), so the
host sends all passes of a draft at once, as one graph where all rows draft equally many, and waits for the last. Rows
whose options no kernel knows (penalties, bans, a grammar) draft without them: their drafts are worse guesses, and
verified as all are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from headrace.sampling.residual import DRAFT_STREAM
from headrace.sampling.sampler import Sampler
from headrace.spec.base import DraftContext, Drafts
from headrace.spec.draft_model import RANKS
from headrace.spec.draft_runner import DraftFollower
from headrace.spec.eagle import HeadFollower, HeadRow
from headrace.spec.parallel_draft import check_mask_token
from headrace.spec.tree import TokenTree, ladder_tree, packed
from headrace.worker.device_cache import DeviceKVCache
from headrace.worker.device_chain import Chained, ChainRunner
from headrace.worker.device_runner import PendingStep
from headrace.worker.device_table import DeviceTable, Hosts

CATCH_UP = 2048  # tokens of prompts that rows may catch up with in one call


class CutModel:
    """A draft model whose logits are of the `vocab_size` tokens that the verifying model has, at most: checkpoints pad
    their vocabularies differently."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: CausalLM, vocab_size: int):
        self.spec, self.attention_layers, self.forward = model.spec, model.attention_layers, model.forward
        self.weight_bytes = model.weight_bytes
        self.inputs = None
        self.vocab_size = min(vocab_size, model.spec.vocab_size)
        self._model, self._vocab_size = model, vocab_size

    def logits(self, hidden: Array) -> Array:
        """float32 [L, V]"""
        logits = self._model.logits(hidden)
        return logits if logits.shape[1] <= self._vocab_size else logits[:, : self._vocab_size].contiguous()

    def carry(self, count: int, last: torch.Tensor | None) -> None:
        """See ChainRunner: a model needs nothing but tokens."""


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


@dataclass(frozen=True)
class _Step:
    """A pass of a chain, as ChainRunner left it for the spans that it had."""

    pending: PendingStep
    ranked: tuple[torch.Tensor, torch.Tensor] | None
    probs: torch.Tensor | None


def _gathered(steps: Sequence[_Step], num_rows: int) -> Chained:
    """What the passes of a chain brought; fewer rows take part in later ones."""

    def together(found: Sequence[np.ndarray], empty: float) -> np.ndarray:
        whole = np.full((num_rows, len(found), *found[0].shape[1:]), empty, found[0].dtype)
        for column, each in enumerate(found):
            whole[: len(each), column] = each
        return whole

    def fetched(tensors: Sequence[torch.Tensor | None]) -> np.ndarray | None:
        there = [each.cpu().numpy() for each in tensors if each is not None]
        return together(there, 0) if len(there) == len(tensors) else None

    tokens = together([step.pending.drawn()[:, 0] for step in steps], -1)
    ids, shares = (fetched([None if s.ranked is None else s.ranked[part] for s in steps]) for part in (0, 1))
    ranked = None if ids is None or shares is None else (ids, shares)
    return Chained(tokens, ranked, fetched([step.probs for step in steps]))


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
        parallel: bool = False,
    ):
        """`parallel`: the model guesses all tokens of a draft in one pass."""
        most, rows = config.max_draft_tokens, config.max_num_seqs
        residual = config.verify == "residual"
        self._model, self._distributions = model, residual and not config.draft_tree
        self.was_usual = False  # the last chain ran as most of its kind will: as a graph that was there
        backend.reserve(layout.groups, model.spec.num_heads, rows, device, config.max_model_len)
        self.cache = DeviceKVCache(layout, dtype, device)
        self.table = DeviceTable(
            rows, config.max_model_len, len(layout.groups), layout.block_size, device, Hosts.NONE,
            DRAFT_STREAM if residual else 0,
        )  # fmt: skip
        # residual verification accepts nodes by the model's probability: the likeliest tokens are drafted
        self._greedy = residual and config.draft_tree > 0
        graphs = config.graphs and not self._distributions and not (parallel and config.draft_tree)
        self._runner = ChainRunner(
            model, self.cache, self.table, backend, Sampler([]), max_tokens, graphs, carry=model.carry,
            carried=model.inputs, most_drafts=most, ring=most + 3, distributions=self._distributions,
            ranks=min(RANKS, model.vocab_size) if config.draft_tree else 0, acceptance=1.0 if parallel else None,
        )  # fmt: skip

    def admit(self, admits: Sequence[Admit]) -> None:
        """Rows begin anew; the GPU is told at once, before they may change hands again."""
        if self._greedy:
            admits = [replace(admit, params=admit.params.with_(temperature=0.0)) for admit in admits]
        self.table.apply(StepPlan(0, admits=tuple(admits)))
        self._runner.flush()

    def place(self, news: Sequence[NewBlocks]) -> None:
        """Rows get blocks; the GPU learns it with the next pass."""
        self.table.apply(StepPlan(0, new_blocks=tuple(news)))

    def send(self, rows: np.ndarray, lengths: np.ndarray, yields: bool = True) -> PendingStep:
        """Start a pass over each row's next tokens."""
        pending = self._runner.execute(self._plan(rows, lengths, yields))
        assert isinstance(pending, PendingStep)
        self.table.host.num_computed[rows] += lengths
        return pending

    def chain(self, rows: np.ndarray, lengths: np.ndarray, depths: np.ndarray, most: int) -> Chained:
        """A pass over each row's next tokens, up to `most` as a rule, and passes of one token until row r has drafted
        depths[r] tokens, which fall."""
        depth = int(depths[0])
        self.was_usual = False
        if int(depths[-1]) == depth:
            captures = self._runner.chains.counts.captures
            drawn = self._runner.chain(self._plan(rows, lengths, True), depth, most)
            if drawn is not None:
                self.was_usual = captures == self._runner.chains.counts.captures
                self.table.host.num_computed[rows] += lengths + depth - 1
                return drawn
        last = None
        if int(lengths.max()) > 1:
            last = torch.from_numpy(np.cumsum(lengths) - 1).to(self.table.view.words.device, non_blocking=True)
        steps: list[_Step] = []
        for column in range(depth):
            going = int(np.count_nonzero(depths > column))
            if column:
                self._model.carry(going, last if column == 1 else None)
            pending = self.send(rows[:going], np.ones(going, np.int32) if column else lengths)
            ranked, probs = self._runner.ranked, self._runner.probs if self._distributions else None
            steps.append(
                _Step(
                    pending,
                    None if ranked is None else (ranked[0][:going].clone(), ranked[1][:going].clone()),
                    None if probs is None else probs[:going],
                )
            )
        return _gathered(steps, len(rows))

    def guess(self, rows: np.ndarray, lengths: np.ndarray, depths: np.ndarray) -> Chained:
        """One pass over each row's next tokens and the depths[r] - 1 masks behind them, whose places are not kept."""
        counts = self._runner.launcher.counts
        replays, captures = counts.replays, counts.captures
        chained = self._runner.guess(self._plan(rows, lengths + depths - 1, True, depths - 1))
        self.was_usual = counts.replays > replays and counts.captures == captures
        self.table.host.num_computed[rows] += lengths
        return chained

    def _plan(
        self, rows: np.ndarray, lengths: np.ndarray, yields: bool, guesses: np.ndarray | int = 0
    ) -> StepPlan:
        spans = np.zeros((4, len(rows)), np.int32)
        spans[0], spans[1], spans[2], spans[3] = rows, self.table.host.num_computed[rows], lengths, guesses
        return StepPlan(0, spans=spans, yields=np.full(len(rows), yields))

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

    def chain(self, rows: np.ndarray, depths: np.ndarray) -> Chained:
        """Drafts of rows; `depths` [R] falls."""
        self._tell(rows)
        known = np.array([len(self._rows[row].request.token_ids) for row in rows.tolist()], np.int32)
        return self.sender.chain(rows, known - self._table.num_computed[rows], depths, 2)

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


class DeviceParallelRunner(DeviceDraftRunner):
    """A draft model that guesses all tokens of a draft in one pass (spec/parallel_draft.py)."""

    def __init__(self, model: CutModel, passes: Passes, layout: KVLayout, max_len: int, mask_token: int):
        """ValueError if the model has no such token."""
        check_mask_token(mask_token, model.spec.vocab_size)
        super().__init__(model, passes, layout, max_len)
        self._mask_token = mask_token

    def chain(self, rows: np.ndarray, depths: np.ndarray) -> Chained:
        """See DeviceDraftRunner."""
        self._tell(rows)
        table = self.sender.table
        known = np.array([len(self._rows[row].request.token_ids) for row in rows.tolist()], np.int32)
        for row, start, depth in zip(rows.tolist(), known.tolist(), depths.tolist(), strict=True):
            table.host.token_ids[row, start : start + depth - 1] = self._mask_token
            table.send_tokens(row, start, start + depth - 1)
        return self.sender.guess(rows, known - self._table.num_computed[rows], depths)


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
        return super().begin(replace(context, nodes=0), most)  # what is drafted is a chain, with others beside it

    def chain(self, rows: np.ndarray, depths: np.ndarray) -> Chained:
        """See DeviceDraftRunner."""
        counts = np.array([self._rows[row].num_kept for row in rows.tolist()], np.int32)
        self._feed(rows, counts)
        return self.sender.chain(rows, counts, depths, int(depths[0]) + 1)

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


class DeviceDraftProposer:
    """A `Proposer` (spec/base.py) over a network on the GPU."""

    def __init__(self, runner: DeviceDraftRunner | DeviceHeadRunner, most_drafts: int, vocab_size: int):
        """Drafts at most `most_drafts` at a time, of the `vocab_size` tokens of the model that verifies them."""
        self.runner, self._vocab_size = runner, vocab_size
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

    def watch(self, context: DraftContext) -> None:
        """See CombinedProposer."""
        if isinstance(self.runner, DeviceHeadRunner) and context.features is not None:
            self.runner.watch(context.features, context.num_tokens)

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

    def _draft(self, context: DraftContext, chosen: np.ndarray, depths: np.ndarray) -> Drafts | None:
        started = time.perf_counter()
        order = np.argsort(-depths, kind="stable")  # rows that draft less are the last ones, and leave the chain early
        chosen, depths = chosen[order], depths[order]
        rows = context.rows[chosen]
        chained = self.runner.chain(rows, depths)
        tokens = np.maximum(chained.tokens, -1)
        for column in range(1, tokens.shape[1]):  # nothing follows where nothing could be drawn
            tokens[tokens[:, column - 1] < 0, column] = -1
        self.runner.end(rows, tokens)
        if self.runner.sender.was_usual:  # others would teach that drafts are slow, and never be seen again
            passes = int(depths[0])
            self.runner.passes = [DraftPass(len(rows), (time.perf_counter() - started) / passes)] * passes
        counts = np.count_nonzero(tokens >= 0, axis=1).tolist()
        if context.nodes and chained.ranked is not None:
            trees = [TokenTree() for _ in context.rows]
            for index, ids, shares, count in zip(chosen.tolist(), *chained.ranked, counts, strict=True):
                trees[index] = ladder_tree(zip(ids[:count], shares[:count], strict=True))
            return packed(trees, context.nodes)
        placed = np.full((len(context.rows), tokens.shape[1]), -1, np.int32)
        placed[chosen] = tokens
        if chained.probs is None:
            return Drafts(placed)
        kept: list[Any] = [None] * len(context.rows)
        for index, probs, count in zip(chosen.tolist(), chained.probs, counts, strict=True):
            # a token that the network does not have is never drafted
            kept[index] = np.pad(probs[:count], ((0, 0), (0, self._vocab_size - probs.shape[1])))
        return Drafts(placed, kept)
