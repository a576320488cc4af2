"""ChainRunner: a drafting network's step and those that follow it, each from the token that the one before drew, as one
CUDA graph.

Nothing of it needs the host: a pass reads the request table on the GPU and writes back into it. A small network's pass
takes the GPU less time than the host needs to send it, so what would be bound by the host is sent once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.core.plan import StepPlan
from headrace.ops.triton.follow import Verified, follow, follow_tokens, hand_over
from headrace.ops.triton.step import Keep
from headrace.worker.device_batch import DeviceBatch, DeviceBatchBuilder
from headrace.worker.device_runner import DeviceRunner
from headrace.worker.graphs import GraphKey, Graphs
from headrace.worker.pending import PendingStep
from headrace.worker.step_kernel import StepKernel

_FEW = 16  # rows up to which chains are padded to one size, so that few graphs serve them


@dataclass(frozen=True)
class ChainKey:
    """What the graph of a chain is good for."""

    first: GraphKey  # the step that it begins with
    follow: GraphKey  # the decode steps behind it
    depth: int  # steps of both kinds
    behind: bool = False  # the first step continues a verification that the host has not seen

    @property
    def short(self) -> bool:
        return True

    @property
    def decodes(self) -> bool:
        return False

    @property
    def num_tokens(self) -> int:
        return self.first.num_tokens


@dataclass(frozen=True)
class Chained:
    """What chains of K steps drew for S spans."""

    tokens: np.ndarray  # int32 [S, K]  negative where there are none
    # int32 and float32 [S, K, RANKS], where trees are drafted: the best of each position, and how likely each is to be
    # accepted
    ranked: tuple[np.ndarray, np.ndarray] | None = None
    probs: np.ndarray | None = None  # float32 [S, K, V], where residual verification asks what tokens were drawn from


class ChainRunner(DeviceRunner):
    """A DeviceRunner that runs chains too. Its caller sees to torch's inference mode."""

    def __init__(
        self,
        *parts: Any,
        carry: Callable[[int, torch.Tensor | None], None],
        carried: torch.Tensor | None,
        ranks: int = 0,
        distributions: bool = False,
        **options: Any,
    ):
        """See DeviceRunner. `carry(R, last)` is called between two steps of R spans, whose last tokens have the indices
        `last` [R] (None: one token a span), to hand on what a step needs of the one before beside its tokens; it writes
        into `carried`, where a chain's first step finds what it needs. `ranks`: best tokens of each position to be
        told. `distributions`: after each step `probs` is what its tokens were drawn from, which no graph can hold."""
        view, device = parts[2].view, parts[2].view.words.device
        self._ranks, self._distributions = ranks, distributions
        most, rows, on_gpu = options["most_drafts"], view.max_rows, device.type == "cuda"
        self.ranked: tuple[torch.Tensor, torch.Tensor] | None = None  # of each span of the step that ran last
        self._chain_ranked: list[torch.Tensor] = []
        if ranks:
            shape = (rows + 1, ranks)
            ids, shares = (torch.zeros(shape, dtype=each, device=device) for each in (torch.int64, torch.float32))
            self.ranked = ids, shares
            self._chain_ranked = [each.new_zeros((most, *shape)) for each in self.ranked]
        self.probs: torch.Tensor | None = None  # float32 [S, V], of the step that ran last
        options["keep"] = Keep.NOISY if ranks else Keep.STAGED if distributions else Keep.NOTHING
        super().__init__(*parts, **options)
        self._carry, self._carried = carry, carried
        self._saved: torch.Tensor | None = None  # `carried`, while a chain of padding is captured
        self._following = DeviceBatchBuilder(self._table, rows, rows, 1, rows + 1, device)
        self._chain_drawn = torch.zeros((most, rows + 1), dtype=torch.int32, device=device)
        self._landing = torch.zeros((most, rows + 1), dtype=torch.int32, pin_memory=on_gpu)
        self._begun = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self._landed = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self._source: Verified | None = None  # of steps that chains may follow
        # of a head: features that a chain's first step continues, and what makes of them what is carried
        self._index = torch.zeros(0 if carried is None else carried.shape[0], dtype=torch.int32, device=device)
        self._fuse: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._followed: tuple[ChainKey, int, int] | None = None  # the chain that followed last, its spans and tokens
        self.chains = Graphs(self._chain, self._idle_chain, self.launcher.enabled, on_gpu)

    def continues(self, source: Verified, fuse: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        """Chains may follow steps of the model that leaves `source`; `fuse` makes of its features what is carried, if
        something is."""
        self._source, self._fuse = source, fuse

    def chain(self, plan: StepPlan, depth: int, most: int) -> Chained | None:
        """Run the step of `plan`, all of whose spans yield and have up to `most` tokens as a rule, and `depth` - 1
        steps of one token a span behind it. None, and nothing is done, without a graph for it."""
        key = self._key(plan, depth, most, False)
        if key is None:
            return None
        self._send(key, plan)
        return self._landed_of(key, plan.num_spans)

    def follow(self, plan: StepPlan, depth: int) -> bool:
        """Send a chain behind the step of the model that was sent last, which has the same spans; whatever of them is
        accepted there is run first, and what is drafted put into the model's table. False, and nothing is done, without
        a graph for it."""
        if self._source is None or self._ranks or self._distributions or self._acceptance is not None:
            return False
        key = self._key(plan, depth, 2 if self._fuse is None else depth + 1, True)
        if key is not None:
            self._send(key, plan)
            self._followed = key, plan.num_spans, plan.num_tokens
        return key is not None

    def again(self) -> None:
        """Send the chain that followed last once more: the same step of the model has run again."""
        assert self._followed is not None
        key, _, num_tokens = self._followed
        self._launch(key, num_tokens)

    def followed(self) -> tuple[Chained, float]:
        """Wait for it: what it drew, and the seconds that it took the GPU."""
        assert self._followed is not None
        key, count, _ = self._followed
        chained = self._landed_of(key, count)
        if self._begun is None or self._landed is None:
            return chained, 0.0
        return chained, self._begun.elapsed_time(self._landed) / 1e3

    def _key(self, plan: StepPlan, depth: int, most: int, behind: bool) -> ChainKey | None:
        """Of a graph that is there, or is captured now; None: there is none."""
        count = plan.num_spans
        warm = bool(self._table.warm[plan.rows].any())
        cut = warm and bool(self._table.cut[plan.rows].any())
        num_tokens = max(plan.num_tokens, count * most) if count <= _FEW else plan.num_tokens
        first, follow = (
            self.launcher.pick_short(count, num_tokens, warm, cut),
            self.launcher.pick(count, count, warm, cut),
        )
        if first is None or follow is None:
            return None
        key = ChainKey(first, follow, depth, behind)
        serves = self.chains.serves(key)
        if self._saved is not None and self._carried is not None:
            self._carried.copy_(self._saved)
            self._saved = None
        return key if serves else None

    def _send(self, key: ChainKey, plan: StepPlan) -> None:
        self.flush()
        self._builder.send(plan, key.first, rewritten=key.behind and self._fuse is not None)
        spans = np.zeros_like(plan.spans)
        spans[0], spans[1], spans[2] = plan.rows, 1, 1
        self._following.send(StepPlan(0, spans=spans, yields=plan.yields), key.follow)
        self._launch(key, plan.num_tokens)

    def _launch(self, key: ChainKey, num_tokens: int) -> None:
        if self._begun is not None:
            self._begun.record(self._stream)
        self.chains.run(key, num_tokens)
        self._landing[: key.depth].copy_(self._chain_drawn[: key.depth], non_blocking=True)
        if self._landed is not None:
            self._landed.record(self._stream)

    def _landed_of(self, key: ChainKey, count: int) -> Chained:
        if self._landed is not None:
            self._landed.synchronize()
        drawn = self._landing.numpy()[: key.depth, :count].T.copy()
        if self.ranked is None:
            return Chained(drawn)
        ids, shares = (each[: key.depth, :count].transpose(0, 1).cpu().numpy() for each in self._chain_ranked)
        return Chained(drawn, (ids, shares))

    def guess(self, plan: StepPlan) -> Chained:
        """Run one step whose spans end in tokens that are yet to be guessed, as drafts of which all are accepted: what
        it drew at each of them and before the first. With `ranks` or `distributions` no graph may hold it."""
        depths = 1 + plan.num_drafts
        pending = self.execute(plan)
        assert isinstance(pending, PendingStep)
        columns = np.arange(int(depths.max()))
        there = columns < depths[:, None]
        tokens = np.where(there, pending.drawn()[:, columns], -1).astype(np.int32)

        def placed(lines: torch.Tensor) -> np.ndarray:
            whole = np.zeros((*there.shape, lines.shape[1]), lines.cpu().numpy().dtype)
            whole[there] = lines.cpu().numpy()
            return whole

        assert self._logits is not None
        ranked = tuple(map(placed, _ranked(self._logits, self._ranks))) if self._ranks else ()
        probs = placed(self._logits.softmax(-1)) if self._distributions else None
        return Chained(tokens, (ranked[0], ranked[1]) if ranked else None, probs)

    def take_kernel(self) -> bool:
        """See DeviceRunner."""
        taken = super().take_kernel()
        if taken:
            self.chains.forget(lambda key: bool(self._kernel_for(key.first) or self._kernel_for(key.follow)))
        return taken

    def close(self) -> None:
        """See DeviceRunner."""
        self.chains.clear()
        super().close()

    def _chain(self, key: ChainKey) -> None:
        warm, cut, rows = key.first.warm, key.first.cut, key.follow.num_rows
        batch = self._builder.padded_batch(key.first)
        if key.behind:
            self._continue(batch, key.num_tokens)
        last = batch.spans.query_start[1 : rows + 1] - 1
        for step in range(key.depth):
            if step:
                self._carry(rows, last if step == 1 else None)
                batch = self._following.padded_batch(key.follow)
            self._step(batch, warm, cut, self._kernel_for(key.follow if step else key.first))
            self._chain_drawn[step, :rows].copy_(self._drawn[:rows, 0])
            for whole, part in zip(self._chain_ranked, self.ranked, strict=True) if self.ranked is not None else ():
                whole[step, :rows].copy_(part[:rows])
        if key.behind and self._source is not None:
            hand_over(self._source, batch.spans, self._chain_drawn[: key.depth])

    def _continue(self, batch: DeviceBatch, num_tokens: int) -> None:
        """Make the first step go on from what the model's step accepted."""
        source = self._source
        assert source is not None
        if self._fuse is None:
            follow_tokens(source, self._table.view, batch.spans)
            return
        assert self._carried is not None and source.features is not None
        index = self._index[:num_tokens]
        follow(source, self._table.view, batch.spans, batch.lines, index)
        self._carried[:num_tokens].copy_(self._fuse(source.features.index_select(0, index)))

    def _step(
        self, batch: DeviceBatch, warm: bool, cut: bool, kernel: StepKernel | None = None
    ) -> torch.Tensor | None:
        """See DeviceRunner."""
        hidden = super()._step(batch, warm, cut, kernel)
        logits, lines = self._logits, batch.lines.line_of
        told = (self._ranks or self._distributions) and self._acceptance is None  # `guess` sees to all lines itself
        if logits is None or not logits.shape[0] or not told:
            return hidden
        scores = logits.index_select(0, lines.clamp(min=0))  # a line a span: that of its first draft
        if self.ranked is not None:
            for buffer, part in zip(self.ranked, _ranked(scores, self._ranks), strict=True):
                buffer[: len(part)].copy_(part)
        if self._distributions:
            self.probs = scores.softmax(-1)
        return hidden

    def _idle_chain(self, key: ChainKey) -> None:
        self._saved = None if self._carried is None else self._carried.clone()
        self._builder.idle(key.first)
        self._following.idle(key.follow)


def _ranked(scores: torch.Tensor, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the best tokens [L, ranks] of scores [L, V], softmax's share of each)."""
    best, ids = scores.topk(ranks)
    return ids, (best - scores.logsumexp(-1, keepdim=True)).exp().nan_to_num(posinf=0.0)
