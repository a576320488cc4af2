"""DeviceRunner: one step on a GPU, as a straight line that the host walks ahead of the GPU.

    plan -> table and patches -> batch -> [inputs -> attention metadata -> forward -> logits -> draw -> table] -> result

What stands in brackets runs on the GPU alone, reads the request table there and writes back into it, so the next step
can be sent before this one's tokens are known; a decode step is one graph, and so is one that verifies drafts. Rows
with options that no kernel knows are drawn for on the host by the sampler of the CPU engine, and their steps are waited
for; so are steps after which there may be drafts (worker/device_speculation.py).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch

from headrace.attention.base import LayerAttention
from headrace.attention.triton import StepAttention, TritonAttention
from headrace.core.plan import StepPlan, StepResult, TokenLogprobs
from headrace.core.visits import MOST_RUNS
from headrace.layers.attention import Attend
from headrace.models.blocks import CausalLM
from headrace.models.spec import ModelSpec
from headrace.ops.triton.follow import Verified
from headrace.ops.triton.paged import HeadShape
from headrace.ops.triton.prefill import prefill_tile
from headrace.ops.triton.runtime import RUNTIME
from headrace.ops.triton.step import Keep, build_inputs, draw, draw_and_commit, patch
from headrace.ops.triton.trees import commit_trees, move_paths
from headrace.ops.xp import Array
from headrace.sampling.logprobs import SLICE, by_span, token_logprobs
from headrace.sampling.sampler import Sampled, Sampler
from headrace.sampling.state import SamplingBatch
from headrace.worker.device_batch import DeviceBatch, DeviceBatchBuilder
from headrace.worker.device_cache import DeviceKVCache
from headrace.worker.device_memory import StepTooLarge
from headrace.worker.device_speculation import Speculation
from headrace.worker.device_table import DeviceTable
from headrace.worker.device_trees import StepTrees
from headrace.worker.graphs import GraphKey, GraphLauncher
from headrace.worker.pending import FinishedStep, PendingStep, Slot, merged
from headrace.worker.step_kernel import StepKernel

_RING = 4  # results on their way to the host: more than there can be steps in flight


class DeviceModel(Protocol):
    """What a runner needs of a model, or of what drafts for one (models/blocks.py says what these are)."""

    spec: ModelSpec
    taps: tuple[int, ...]

    @property
    def attention_layers(self) -> list[LayerAttention]: ...

    def forward(self, token_ids: Array, positions: Array, attend: Attend) -> Array: ...

    def logits(self, hidden: Array) -> Array: ...


class DeviceRunner:
    """Runs plans against one model and one KV cache on a GPU."""

    def __init__(
        self,
        model: DeviceModel,
        cache: DeviceKVCache,
        table: DeviceTable,
        backend: TritonAttention,
        sampler: Sampler,
        max_tokens: int,
        graphs: bool,
        speculation: Speculation | None = None,
        most_drafts: int = 0,
        ring: int = _RING,
        trees: bool = False,
        keep: Keep = Keep.NOTHING,
        acceptance: float | None = None,
        step_kernel: StepKernel | None = None,
    ):
        """`most_drafts`: of a span. Steps of spans no longer than 1 + these have graphs of their own. `ring`: more than
        there can be steps in flight. `trees`: drafts may be token trees. `keep` and `acceptance`: see draw_and_commit,
        which takes both from chains of drafts alone. `step_kernel` runs padded steps that it serves."""
        self._model, self._cache, self._table, self._backend, self._sampler = model, cache, table, backend, sampler
        self._layers = model.attention_layers
        self._step_kernel = step_kernel
        device = table.view.words.device
        max_rows = table.view.max_rows
        layer = self._layers[0]
        tile = prefill_tile(HeadShape(layer.num_heads, layer.num_kv_heads, layer.head_dim))
        alone_from = backend.alone_from(self._layers, cache.dtype)
        self._speculation, self._keep, self._acceptance = speculation, keep, acceptance
        self._builder = DeviceBatchBuilder(
            table, max_rows, max_tokens, tile, alone_from, device, most_drafts=most_drafts, ring=ring, trees=trees,
            invariant=RUNTIME.invariant and speculation is not None,
        )  # fmt: skip
        self._drawn = torch.zeros((max_rows, 1 + most_drafts), dtype=torch.int32, device=device)
        self._paths = torch.zeros((max_rows + 1, 1 + most_drafts), dtype=torch.int32, device=device) if trees else None
        self._features: torch.Tensor | None = None  # [max tokens, F] of the step that ran last, where one asks for them
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if on_gpu else None
        self._slots = [
            Slot(
                torch.zeros((MOST_RUNS, max_rows, 1 + most_drafts), dtype=torch.int32, pin_memory=on_gpu),
                self._stream,
                torch.cuda.Event(enable_timing=True) if on_gpu else None,
                torch.cuda.Event(enable_timing=True) if on_gpu else None,
            )
            for _ in range(ring)
        ]
        self._turn = 0
        self._pending: deque[PendingStep] = deque(maxlen=ring - 1)  # the last ones sent, whose results may be unread
        self._unsettled: deque[PendingStep] = deque(maxlen=ring)  # whose tokens the host's table may not know
        self._logits: torch.Tensor | None = None  # of the step that runs, for rows drawn on the host
        if speculation is not None and speculation.wants_features:
            assert isinstance(model, CausalLM)
            self._features_of = model.features
            size = model.spec.hidden_size * max(1, len(model.taps))
            self._features = torch.zeros((max_tokens, size), dtype=cache.dtype, device=device)
        if speculation is not None:
            starts, num_drafts = self._builder.spans_of()
            speculation.proposer.continues(Verified(table.view, starts, num_drafts, self._drawn, self._features))
        self.launcher = GraphLauncher(
            self._padded, self._builder.idle, max_rows, max_tokens, graphs, on_gpu,
            most_short=self._builder.max_lines if most_drafts else 0, trees=trees,
        )  # fmt: skip
        self.launcher.prepare()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingStep | FinishedStep:
        """Send one step; its result can be waited for."""
        started = time.perf_counter()
        table = self._table
        if self._speculation is not None:
            self._speculation.release(plan.released)
        table.apply(plan)
        waits = self._speculation is not None and self._speculation.begin(plan)
        self._cache.copy_blocks(plan.block_copies)
        hosted = table.hosted[plan.rows]
        any_hosted = bool(hosted.any())
        assert plan.num_runs == 1 or not any_hosted, "the host sees every token of such rows"
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        warm = bool(table.warm[plan.rows].any())
        cut = warm and bool(table.cut[plan.rows].any())
        trees = self._trees(plan)
        made = RUNTIME.loaded, self.launcher.counts.captures
        # the graph that might serve
        could = None if any_hosted else self._pick(plan, warm, cut, trees is not None)
        key = could if could is not None and self.launcher.serves(could) else None
        self.flush()
        batch = self._builder.send(plan, key, trees)
        slot.begin()
        late = self._speculation is not None and not any_hosted and not waits  # its tokens are taken in later
        features: list[torch.Tensor] = []  # of each run: heads go on from them when drafts are wanted again
        hidden: torch.Tensor | None = None
        num_runs = plan.num_runs
        for run in range(num_runs):
            if run and waits and (key is None or not self._draft_behind(plan, run, num_runs)):
                num_runs = run
                break
            if key is not None:
                self.launcher.run(key, plan.num_tokens)
            else:
                try:
                    hidden = self._step_or_too_large(batch, warm, cut)
                except StepTooLarge as error:
                    if run:
                        error.done, error.num_done = self._sent(replace(plan, num_runs=run), slot, features), run
                    raise
            slot.drawn[run, : plan.num_spans].copy_(self._drawn[: plan.num_spans], non_blocking=True)
            if late and self._features is not None:
                features.append(self._features[: plan.num_tokens].clone())
        slot.end()
        # a step that waited for a compiler says nothing of the others
        observe = None
        if could is not None and RUNTIME.loaded == made[0] and not (waits and num_runs > 1):
            observe = partial(self.launcher.observe, could, key is not None)
        warming = (RUNTIME.loaded, self.launcher.counts.captures) != made
        ran = plan if num_runs == plan.num_runs else replace(plan, num_runs=num_runs)
        pending = PendingStep(ran, slot, plan.yields & ~hosted, time.perf_counter() - started, observe, warming)
        self._pending.append(pending)
        if self._speculation is None and any_hosted:
            table.advance(plan)
        if not any_hosted and not waits:
            if late:
                self._commit_late(pending, plan, features)
            return pending
        self._take_in()
        if not any_hosted and self._speculation is not None:
            if trees is None:
                self._draft_behind(plan, num_runs, 1)
            pending.settle = partial(self._finish, plan, hosted, batch, trees)
            return pending  # what comes of its tokens is done when they are asked for
        drawn_here = None if hidden is None else self._draw_on_host(plan, hosted, hidden, trees)
        result = pending.result() if drawn_here is None else merged(pending.result(), *drawn_here)
        if waits:
            return FinishedStep(self._finish(plan, hosted, batch, trees, result))
        if self._speculation is not None:
            told = None if self._features is None else self._features[: plan.num_tokens].clone()
            self._speculation.commit_late(plan, self._speculation.admissions(plan), told, result)
        else:
            for span in np.flatnonzero(hosted & plan.yields).tolist():
                for token in result.tokens[span]:
                    table.commit_hosted(int(plan.rows[span]), token)
        self.flush()  # before a row may change hands
        return FinishedStep(result)

    def _take_in(self) -> None:
        """The host's table learns what came of all steps but the one being sent."""
        while self._unsettled:
            self._unsettled.popleft().result()

    def _draft_behind(self, plan: StepPlan, sent: int, num_runs: int) -> bool:
        """Send what drafts behind a step that verifies, of which so many runs were `sent` and `num_runs` are to be.
        False if nothing can."""
        assert self._speculation is not None
        if sent > 1:
            return self._speculation.again()
        self._take_in()
        return self._speculation.follow(plan, num_runs)

    def settle(self) -> None:
        """Wait for all that was sent and read it, for more steps to follow than results can lie about."""
        while self._pending:
            self._pending.popleft().result()

    def _commit_late(self, pending: PendingStep, plan: StepPlan, features: list[torch.Tensor]) -> None:
        """What comes of the step is taken in when its tokens are read, `features` [T, F] of each run included."""
        assert self._speculation is not None
        # the tokens of a span, one a run, lie one behind the other
        told = torch.stack(features, 1).flatten(0, 1) if len(features) > 1 else features[0] if features else None
        admissions = self._speculation.admissions(plan)
        pending.settle = partial(self._speculation.commit_late, plan, admissions, told)
        self._unsettled.append(pending)

    def _sent(self, plan: StepPlan, slot: Slot, features: list[torch.Tensor]) -> PendingStep:
        """Runs of a step, after which it could not go on."""
        slot.end()
        pending = PendingStep(plan, slot, plan.yields, 0.0, None)
        if self._speculation is not None:
            self._commit_late(pending, plan, features)
        return pending

    @torch.inference_mode()
    def _finish(
        self, plan: StepPlan, hosted: np.ndarray, batch: DeviceBatch, trees: StepTrees | None, result: StepResult
    ) -> StepResult:
        """A step that drafts may come of has its tokens."""
        assert self._speculation is not None
        features = self._features if trees is None else self._keep_paths(trees, hosted, batch, result)
        result = self._speculation.finish(plan, result, features)
        self.flush()  # before a row may change hands
        return result

    @torch.inference_mode()
    def idle(self) -> bool:
        """No step is in flight: capture a graph that repays. Whether one was, and there may be more."""
        return self.take_kernel() or self.launcher.capture_idle()

    def take_kernel(self) -> bool:
        """Use the kernel for whole steps from now on, if it has been compiled meanwhile. Whether it has."""
        if self._step_kernel is None or not self._step_kernel.arrives():
            return False
        self.launcher.forget(self._step_kernel.serves)
        self.launcher.prepare()
        return True

    def _trees(self, plan: StepPlan) -> StepTrees | None:
        """The drafts of a plan that are trees."""
        host = self._table.host
        parents = None if self._paths is None else host.tree_parents(plan)
        return None if parents is None else StepTrees.of(plan, parents, host.token_ids, host.num_tokens)

    def _pick(self, plan: StepPlan, warm: bool, cut: bool, tree: bool) -> GraphKey | None:
        """The graph that a step without hosted rows might run under."""
        if plan.num_decodes == plan.num_spans:
            if RUNTIME.invariant and not self._builder.generated(plan).all():
                return None
            return self.launcher.pick(plan.num_spans, plan.num_spans, warm, cut)
        if self._builder.is_short(plan):
            far = self._step_kernel is not None and self._step_kernel.too_far(plan)
            return self.launcher.pick_short(plan.num_spans, plan.num_tokens, warm, cut, tree, far)
        if plan.num_drafts.any():
            return None
        return self.launcher.pick(plan.num_spans, plan.num_tokens, warm, cut)

    @torch.inference_mode()
    def rehearse(self, step: GraphKey | StepPlan, warm: bool, cut: bool) -> None:
        """Call the kernels of a step, padded to a graph's size or as it is, of which nothing is wanted: on torch's meta
        device, to learn which kernels there are (worker/rehearsal.py)."""
        if isinstance(step, GraphKey):
            self._padded(step)
            return
        for row in step.rows.tolist():
            self._table.send_progress(row)
        self.flush()
        self._step(self._builder.send(step, None), warm, cut)

    def close(self) -> None:
        """Give the graphs, the cache and the model back, whoever still holds this runner."""
        self.launcher.clear()
        del self._model, self._cache, self._backend, self._logits, self._step_kernel

    def flush(self) -> None:
        """The GPU learns what has changed in the table."""
        if (patches := self._builder.take_patches()) is not None:
            patch(self._table.view.words, *patches)

    def _padded(self, key: GraphKey) -> None:
        self._step(self._builder.padded_batch(key), key.warm, key.cut, self._kernel_for(key))

    def _kernel_for(self, key: GraphKey) -> StepKernel | None:
        kernel = self._step_kernel
        return kernel if kernel is not None and kernel.serves(key) else None

    def _step_or_too_large(self, batch: DeviceBatch, warm: bool, cut: bool) -> torch.Tensor | None:
        try:
            return self._step(batch, warm, cut)
        except torch.OutOfMemoryError as error:
            raise StepTooLarge(str(error).splitlines()[0]) from None

    def _step(
        self, batch: DeviceBatch, warm: bool, cut: bool, kernel: StepKernel | None = None
    ) -> torch.Tensor | None:
        """What runs on the GPU; returns the hidden states [T, H], unless a `kernel` keeps them to itself."""
        view = self._table.view
        build_inputs(view, batch.spans, batch.longest, self._cache.layout.block_size)
        hidden: torch.Tensor | None
        if kernel is None:
            hidden, self._logits = self._forward(batch)
        else:
            self._logits = kernel.logits(batch)
            hidden = None if self._features is None else kernel.hidden(batch.spans.token_ids.shape[0])
        if self._features is not None and hidden is not None:
            self._features[: hidden.shape[0]].copy_(self._features_of(hidden))
        if batch.tree is None or self._paths is None:
            draw_and_commit(
                view, batch.spans, batch.lines, self._logits, warm, cut, self._drawn, self._keep, self._acceptance
            )
            return hidden
        shift = batch.tree.shift
        lines = replace(
            batch.lines, shift=shift if batch.logit_index is None else shift.index_select(0, batch.logit_index)
        )
        draws = draw(view, batch.spans, lines, self._logits, warm, cut)
        commit_trees(view, batch.spans, lines, draws, batch.tree, self._drawn, self._paths)
        self._move(batch, self._paths)
        return hidden

    def _forward(self, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden states [T, H], logits float32 [L, V])."""
        if batch.tree is not None:
            batch.spans.positions.add_(batch.tree.shift)
        metas = [self._backend.plan(batch, g, group) for g, group in enumerate(self._cache.layout.groups)]
        attend = StepAttention(self._backend, self._cache, metas, self._layers)
        hidden = self._model.forward(batch.spans.token_ids, batch.spans.positions, attend)
        wanted = hidden if batch.logit_index is None else hidden.index_select(0, batch.logit_index)
        if not wanted.shape[0]:
            return hidden, hidden.new_zeros((0, 1), dtype=torch.float32)
        return hidden, self._model.logits(wanted)

    def _move(self, batch: DeviceBatch, paths: torch.Tensor) -> None:
        """Bring what the step wrote for accepted drafts to where they stand."""
        for layer in range(len(self._layers)):
            move_paths(self._cache.pages(layer), self._cache.group(layer), batch.spans, paths)

    def _keep_paths(
        self, trees: StepTrees, hosted: np.ndarray, batch: DeviceBatch, result: StepResult
    ) -> torch.Tensor | None:
        """Do the same for rows that the host drew for; the step's features in the order of what was accepted."""
        paths = trees.paths(result.tokens)
        mine = {span: path for span, path in paths.items() if hosted[span] and path}
        if mine and self._paths is not None:
            told = np.zeros((len(hosted), self._paths.shape[1]), np.int32)
            for span, path in mine.items():
                told[span, 0], told[span, 1 : 1 + len(path)] = len(path), path
            self._move(batch, torch.from_numpy(told).to(self._paths.device))
        order = trees.order(paths)
        if self._features is None or order is None:
            return self._features
        count = len(order)
        self._features[:count] = self._features[torch.from_numpy(order).to(self._features.device)]
        return self._features

    # -- rows that the host draws for

    def _draw_on_host(
        self, plan: StepPlan, hosted: np.ndarray, hidden: torch.Tensor, trees: StepTrees | None
    ) -> tuple[Sampled, dict[int, list[TokenLogprobs]]]:
        """What the CPU engine's sampler draws for the hosted rows of a step that ran unpadded, and their prompts'
        logprobs."""
        assert self._logits is not None
        table = self._table.host
        wanted = np.where(plan.yields, 1 + plan.num_drafts, 0)
        span_of = np.repeat(np.arange(plan.num_spans, dtype=np.int32), wanted)
        within = np.arange(len(span_of)) - np.repeat(np.cumsum(wanted) - wanted, wanted)
        mine = np.flatnonzero(hosted[span_of])  # lines of logits
        spans, within = span_of[mine], within[mine]
        rows = plan.rows[spans]
        logits = self._logits[torch.from_numpy(mine).to(hidden.device)].float().cpu().numpy()
        positions = table.num_tokens[rows] + within
        last = within == plan.num_drafts[spans]
        drafts = np.where(last, -1, table.token_ids[rows, np.where(last, 0, positions)]).astype(np.int32)
        tree = None
        if trees is not None:
            tree, depths = trees.rows(trees.query_start[spans + 1] - 1 - plan.num_drafts[spans] + within)
            if tree is not None:
                nodes = tree.parents > -2
                positions = np.where(nodes, table.num_tokens[rows] + depths, positions)
                drafts[nodes] = -1
        batch = SamplingBatch(table.sampling, rows, positions, table.token_ids, trees=tree)
        sampled = self._sampler.sample(logits, batch, spans, plan.num_spans, drafts)
        return sampled, self._prompt_logprobs(plan, hidden)

    def _prompt_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        """By span, of the prompt tokens that follow its tokens."""
        table = self._table.host
        sampling = table.sampling
        span_of = np.repeat(np.arange(plan.num_spans, dtype=np.int32), plan.lengths)
        first = np.cumsum(plan.lengths) - plan.lengths
        positions = (np.arange(plan.num_tokens) - first[span_of] + plan.starts[span_of]).astype(np.int32)
        rows = plan.rows[span_of]
        wanted = (sampling.prompt_logprobs[rows] >= 0) & (positions + 1 < sampling.prompt_len[rows])
        index = np.flatnonzero(wanted)
        if not len(index):
            return {}
        tokens = table.token_ids[rows[index], positions[index] + 1].tolist()
        counts = sampling.prompt_logprobs[rows[index]].tolist()
        entries: list[TokenLogprobs] = []
        for start in range(0, len(index), SLICE):
            part = slice(start, start + SLICE)
            chosen = torch.from_numpy(index[part]).to(hidden.device)
            logits = self._model.logits(hidden[chosen]).float().cpu().numpy()
            entries += token_logprobs(logits, tokens[part], counts[part])
        return by_span(span_of[index], entries)
