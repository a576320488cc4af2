"""ModelRunner: one step, as a straight line.

    plan -> table -> batch -> attention metadata -> forward -> logits -> sample/verify -> table -> proposer -> result

A new kernel, format, graph mode or proposer plugs into one of the objects called here; this file does not change.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from headrace.attention.base import AttentionBackend
from headrace.core.plan import StageTimes, StepPlan, StepResult, TokenLogprobs
from headrace.models.blocks import CausalLM
from headrace.ops.xp import Array
from headrace.sampling.logprobs import SLICE, by_span, token_logprobs
from headrace.sampling.sampler import DAMAGED, Sampler
from headrace.sampling.state import SamplingBatch
from headrace.spec.base import DraftContext, StepFeatures
from headrace.spec.combined import CombinedProposer
from headrace.worker.batch import BatchBuilder, StepBatch
from headrace.worker.kv_cache import KVCache
from headrace.worker.recorded import RecordedLauncher
from headrace.worker.table import RequestTable, told_of
from headrace.worker.trees import keep_paths, tree_rows


class ModelRunner:
    """Runs plans against one model and one KV cache."""

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        table: RequestTable,
        backend: AttentionBackend,
        sampler: Sampler,
        proposer: CombinedProposer,
        draft_nodes: int = 0,
    ):
        """`draft_nodes`: most nodes of a draft that is a tree; 0: drafts are chains."""
        self._model = model
        self._cache = cache
        self._table = table
        self._backend = backend
        self._sampler = sampler
        self._proposer = proposer
        self._draft_nodes = draft_nodes
        self._builder = BatchBuilder(table, cache.layout.block_size)
        self._launcher = RecordedLauncher(self._forward)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step to its end."""
        t0 = time.perf_counter()
        self._proposer.release(plan.released)
        self._table.apply(plan)
        self._proposer.admit(plan.admits)
        self._cache.copy_blocks(plan.block_copies)
        key = self._launcher.pick(plan.num_tokens, plan.num_spans, None)
        batch = self._builder.build(plan, key)
        metas = [self._backend.plan(batch, g, group) for g, group in enumerate(self._cache.layout.groups)]
        t1 = time.perf_counter()
        hidden, *tapped = self._launcher.run(batch, metas)
        t2 = time.perf_counter()
        logits = self._model.logits(hidden[batch.logit_index])
        t3 = time.perf_counter()
        decodes = plan.num_decodes == plan.num_spans
        rows = batch.rows if decodes else batch.rows[batch.logit_span]
        positions = batch.seq_lens if decodes else batch.positions[batch.logit_index] + 1
        sampling = SamplingBatch(self._table.sampling, rows, positions, self._table.token_ids, trees=tree_rows(batch))
        drafts = None if decodes else self._drafts(batch, sampling)
        sampled = self._sampler.sample(logits, sampling, batch.logit_span, batch.num_spans, drafts)
        prompt_logprobs = self._prompt_logprobs(batch, hidden) if len(batch.prompt_index) else {}
        damaged = {span: DAMAGED for span, entries in prompt_logprobs.items() if not all(entries)}
        order = None
        if batch.parents is not None:
            layers = len(self._model.attention_layers)
            order = keep_paths(batch, sampled.taken, self._cache, self._backend, layers)
        self._table.commit(plan, sampled)
        t4 = time.perf_counter()
        num_drafts, sources, values = list[int](), list[int](), dict[int, list[float]]()
        if self._proposer.names:
            made = np.concatenate(tapped, 1) if tapped else hidden
            num_drafts, sources, values = self._propose(plan, batch, made, order)
        tokens = [row[:count] for row, count in zip(sampled.tokens.tolist(), sampled.counts.tolist(), strict=True)]
        return StepResult(
            plan.step_id,
            tokens=tokens,
            num_accepted=[max(0, len(each) - 1) for each in tokens],
            num_drafts=num_drafts,
            draft_sources=sources,
            draft_values=values,
            draft_passes=self._proposer.passes(),
            draft_seconds=self._proposer.seconds,
            dropped=self._proposer.dropped(),
            warming=self._launcher.warming,
            candidates=sampled.candidates,
            errors={**damaged, **sampled.errors},
            times=StageTimes(t1 - t0, t2 - t1, t3 - t2, t4 - t3, time.perf_counter() - t4),
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _forward(self, batch: StepBatch, metas: list[Any]) -> tuple[Array, ...]:
        """Hidden states, and the residual streams that heads continue."""
        layers = self._model.attention_layers

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            meta = metas[self._cache.group(layer)]
            return self._backend.run(q, k, v, self._cache.pages(layer), meta, layers[layer])

        hidden = self._model.forward(batch.token_ids, batch.positions, attend)
        return hidden, *(self._model.tapped if self._model.taps else ())

    def _propose(
        self, plan: StepPlan, batch: StepBatch, made: Array, order: np.ndarray | None
    ) -> tuple[list[int], list[int], dict[int, list[float]]]:
        """Drafts for the next step: how many each span's row holds, by which proposer, and what nodes of trees promise.
        `made` [T, F]: what the model made of the step's tokens; `order`: as keep_paths returned it."""
        table, rows, features = self._table, plan.rows[plan.yields], None
        if self._proposer.wants_features:
            starts = batch.positions[batch.query_start[:-1]]
            values = made if order is None else made[order]
            features = StepFeatures(batch.rows, starts, batch.query_start, table.num_computed, values)
        if plan.draft_limits is not None and not len(plan.draft_limits):
            self._proposer.rest(DraftContext(rows, table.token_ids, table.num_tokens, limits=[], features=features))
            return [0] * plan.num_spans, [], {}
        context = DraftContext(
            rows,
            table.token_ids,
            table.num_tokens,
            limits=table.sampling.max_drafts[rows].tolist(),
            sampling=table.sampling,
            features=features,
            wanted=None if plan.draft_limits is None else plan.draft_limits[:, plan.yields],
            nodes=self._draft_nodes,
        )
        drafts = self._proposer.propose(context)
        return told_of(plan, drafts, table.hold_drafts(rows, drafts))

    def _prompt_logprobs(self, batch: StepBatch, hidden: Array) -> dict[int, list[TokenLogprobs]]:
        """By span, of the prompt tokens that follow its tokens, a slice at a time: a prompt's logits are large."""
        index, rows = batch.prompt_index, batch.rows[batch.prompt_span]
        tokens = self._table.token_ids[rows, batch.positions[index] + 1].tolist()
        counts = self._table.sampling.prompt_logprobs[rows].tolist()
        entries: list[TokenLogprobs] = []
        for start in range(0, len(index), SLICE):
            part = slice(start, start + SLICE)
            entries += token_logprobs(self._model.logits(hidden[index[part]]), tokens[part], counts[part])
        return by_span(batch.prompt_span, entries)

    def _drafts(self, batch: StepBatch, sampling: SamplingBatch) -> np.ndarray:
        """The draft at each drawn token's position, -1 where there is none, and in trees."""
        span, drafts = batch.logit_span, np.full(len(batch.logit_span), -1, np.int32)
        if len(span) == batch.num_spans and sampling.trees is None and not batch.num_drafts.any():
            return drafts
        drafts[:-1] = np.where(span[1:] == span[:-1], batch.token_ids[batch.logit_index[1:]], -1)
        if sampling.trees is not None:
            drafts[sampling.trees.parents > -2] = -1
        return drafts
