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
from headrace.models.blocks import CausalLM
from headrace.models.eagle_head import EagleHead
from headrace.ops.triton.follow import Verified
from headrace.ops.xp import Array
from headrace.sampling.residual import DRAFT_STREAM
from headrace.sampling.sampler import Sampler
from headrace.spec.base import DraftContext, Drafts
from headrace.spec.draft_model import RANKS
from headrace.spec.draft_runner import DraftFollower
from headrace.spec.parallel_draft import check_mask_token
from headrace.spec.tree import TokenTree, ladder_tree, packed
from headrace.worker.device_cache import DeviceKVCache
from headrace.worker.device_chain import Chained, ChainRunner
from headrace.worker.device_eagle import DeviceHeadRunner, HeadModel, follow_depth
from headrace.worker.device_table import DeviceTable, Hosts
from headrace.worker.pending import PendingStep
from headrace.worker.step_kernel import StepKernelChoice

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
        self.model, self._vocab_size = model, vocab_size

    def logits(self, hidden: Array) -> Array:
        """float32 [L, V]"""
        logits = self.model.logits(hidden)
        return logits if logits.shape[1] <= self._vocab_size else logits[:, : self._vocab_size].contiguous()

    def carry(self, count: int, last: torch.Tensor | None) -> None:
        """See ChainRunner: a model needs nothing but tokens."""


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
        step_kernel: StepKernelChoice | None = None,
    ):
        """`parallel`: the model guesses all tokens of a draft in one pass. `step_kernel`: of a model that is not."""
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
        self.step_kernel, kernel = step_kernel, None
        if step_kernel is not None and isinstance(model, CutModel):
            kernel = step_kernel.kernel(model.model, self.cache, model.vocab_size)
        self._runner = ChainRunner(
            model, self.cache, self.table, backend, Sampler([]), max_tokens, graphs, carry=model.carry,
            carried=model.inputs, most_drafts=most, ring=most + 3, distributions=self._distributions,
            ranks=min(RANKS, model.vocab_size) if config.draft_tree else 0, acceptance=1.0 if parallel else None,
            step_kernel=kernel,
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

    def continues(self, source: Verified, head: EagleHead | None) -> None:
        """See ChainRunner."""
        self._runner.continues(source, None if head is None else head.fuse)

    def follow(self, rows: np.ndarray, lengths: np.ndarray, depth: int) -> bool:
        """Send a chain of `depth` passes behind a step of the model over rows' spans of `lengths` tokens, if it can."""
        captures = self._runner.chains.counts.captures
        sent = self._runner.follow(self._plan(rows, lengths, True), depth)
        self.was_usual = captures == self._runner.chains.counts.captures
        return sent

    def again(self) -> None:
        """See ChainRunner."""
        self._runner.again()

    def followed(self) -> tuple[Chained, float]:
        """See ChainRunner."""
        return self._runner.followed()

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

    @property
    def num_captures(self) -> int:
        """See CombinedProposer."""
        return self._runner.chains.counts.captures + self._runner.launcher.counts.captures

    def idle(self) -> bool:
        """See CombinedProposer."""
        return self._runner.take_kernel()

    def close(self) -> None:
        """See DeviceRunner."""
        self._runner.close()
        if self.step_kernel is not None:
            self.step_kernel.stop()


class DeviceDraftRunner(DraftFollower):
    """A draft model on the GPU."""

    def __init__(self, model: CutModel, passes: Passes, layout: KVLayout, max_len: int):
        # of the two tokens that `follow` runs the first was mostly run before: its window is to be there still
        kept = replace(
            layout, groups=tuple(replace(g, window=None if g.window is None else g.window + 1) for g in layout.groups)
        )
        super().__init__(kept, passes.cache, passes.table.host, min(max_len, model.spec.max_position), CATCH_UP)
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
        lengths = self._table.num_tokens[rows] - self._table.num_computed[rows]
        return self.sender.chain(rows, lengths, depths, 2)

    def follow(
        self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, limits: np.ndarray, num_runs: int
    ) -> int:
        """See DeviceHeadRunner: every row's known tokens must have been computed, and the drafts that are verified be
        its own, of which all but the last were."""
        depth = follow_depth(lengths, limits, num_runs)
        if not depth:
            return 0
        tokens = self._table.token_ids
        for number, start, length in zip(rows.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            row, known = self._rows.get(number), start + 1
            if row is None or row.request.num_computed != known or len(row.request.token_ids) != known:
                return 0
            drafts = tokens[number, known : known + length - 2].tolist() if length > 2 else []
            most = known + num_runs * length + depth
            if row.drafts[: len(drafts)] != drafts or most > self._max_len or not self._allocate(row, most - 1):
                return 0
        return depth if self.sender.follow(rows, np.full(len(rows), 2, np.int32), depth) else 0

    def take_followed(self, rows: np.ndarray, num_tokens: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """See DeviceHeadRunner; `drafts` int32 [R, K] were drawn."""
        known = num_tokens[rows]
        going = np.ones(len(rows), bool)
        for index, (number, count) in enumerate(zip(rows.tolist(), known.tolist(), strict=True)):
            request = self._rows[number].request
            going[index] = count > len(request.token_ids)
            request.token_ids += self._table.token_ids[number, len(request.token_ids) : count].tolist()
            self._sent[number] = count
        self._table.num_computed[rows] = known + drafts.shape[1] - 1
        self.end(rows, drafts)
        return going

    def _tell(self, rows: np.ndarray) -> None:
        table, numbers = self.sender.table, rows.tolist()
        known = np.array([len(self._rows[number].request.token_ids) for number in numbers], np.int32)
        sent = np.array([self._sent[number] for number in numbers], np.int32)
        table.host.num_tokens[rows] = known
        table.send_many(rows, sent, known - sent)
        table.send_all_progress(rows)
        self._sent.update(zip(numbers, known.tolist(), strict=True))

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


def _until_none(tokens: np.ndarray) -> np.ndarray:
    """Drafts int32 [R, K]: nothing follows where nothing could be drawn."""
    tokens = np.maximum(tokens, -1)
    for column in range(1, tokens.shape[1]):
        tokens[tokens[:, column - 1] < 0, column] = -1
    return tokens


class DeviceDraftProposer:
    """A `Proposer` (spec/base.py) over a network on the GPU."""

    def __init__(self, runner: DeviceDraftRunner | DeviceHeadRunner, most_drafts: int, vocab_size: int):
        """Drafts at most `most_drafts` at a time, of the `vocab_size` tokens of the model that verifies them."""
        self.runner, self._vocab_size = runner, vocab_size
        self._most_drafts = most_drafts
        self.wants_features = isinstance(runner, DeviceHeadRunner)
        self._followed = 0  # passes that were sent behind the step that verifies

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

    @property
    def num_captures(self) -> int:
        """See CombinedProposer."""
        return self.runner.sender.num_captures

    @property
    def step_kernel(self) -> StepKernelChoice | None:
        """See CombinedProposer."""
        return self.runner.sender.step_kernel

    @torch.inference_mode()
    def idle(self) -> bool:
        """See CombinedProposer."""
        return self.runner.sender.idle()

    def close(self) -> None:
        """Let go of the network and its cache."""
        self.runner.sender.close()

    def continues(self, source: Verified) -> None:
        """See CombinedProposer."""
        head = self.runner.model.head if isinstance(self.runner.model, HeadModel) else None
        self.runner.sender.continues(source, head)

    @property
    def follows(self) -> bool:
        """See CombinedProposer."""
        return not isinstance(self.runner, DeviceParallelRunner)

    @torch.inference_mode()
    def follow(
        self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, limits: np.ndarray, num_runs: int
    ) -> bool:
        """See CombinedProposer."""
        limits = np.minimum(limits, self._most_drafts)
        self._followed = self.runner.follow(rows, starts, lengths, limits, num_runs)
        return self._followed > 0

    @torch.inference_mode()
    def again(self) -> None:
        """See CombinedProposer."""
        self.runner.sender.again()

    def _take_followed(self, context: DraftContext) -> Drafts:
        """What was drafted behind the step that verified."""
        depth, self._followed = self._followed, 0
        chained, seconds = self.runner.sender.followed()
        tokens = _until_none(chained.tokens)
        going = self.runner.take_followed(context.rows, context.num_tokens, tokens)
        tokens[~going] = -1
        self.runner.passes = []
        if self.runner.sender.was_usual:
            self.runner.passes = [DraftPass(len(going), seconds / depth)] * depth
        return Drafts(tokens, placed=True)

    def propose(self, context: DraftContext) -> Drafts | None:
        return self._take_followed(context) if self._followed else self._make(context)

    @torch.inference_mode()
    def _make(self, context: DraftContext) -> Drafts | None:
        chosen, depths = self.runner.begin(context, self._most_drafts)
        drafts = self._draft(context, chosen, depths) if len(chosen) else None
        if isinstance(self.runner, DeviceHeadRunner):
            self.runner.settle()
        return drafts

    def _draft(self, context: DraftContext, chosen: np.ndarray, depths: np.ndarray) -> Drafts | None:
        started = time.perf_counter()
        if (depths != depths[0]).any():
            order = np.argsort(-depths, kind="stable")  # rows that draft less come last, and leave the chain early
            chosen, depths = chosen[order], depths[order]
        rows = context.rows[chosen]
        chained = self.runner.chain(rows, depths)
        tokens = _until_none(chained.tokens)
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
