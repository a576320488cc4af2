"""Speculation on a GPU: what the host does between two steps of an engine that drafts.

The GPU verifies (ops/triton/step.py): it draws at every position of a span, keeps the drafts that equal what it drew
and sets the row back by the others. Where drafts come from is decided here, and that needs the tokens: no step follows
one of such an engine before its result is read, but for further runs of the same step, whose drafts a network makes on
the GPU. Then the host's table takes in what came of it, proposers are asked, and the drafts that the next step verifies
go over with its patches, into the table behind the known tokens of their rows; of a network that could follow at once
(worker/device_chain.py) they are there already. Steps after which the plan wants no drafts may overlap; the host's
table takes in their tokens when the engine reads them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from headrace.core.plan import StepPlan, StepResult
from headrace.ops.triton.runtime import RUNTIME
from headrace.sampling.sampler import Sampled
from headrace.spec.base import DraftContext, StepFeatures
from headrace.spec.combined import CombinedProposer
from headrace.worker.device_table import DeviceTable
from headrace.worker.table import told_of


class Speculation:
    """Keeps the host's table and asks the proposers."""

    def __init__(self, table: DeviceTable, proposer: CombinedProposer, most_drafts: int, nodes: int = 0):
        """`most_drafts`: of a row in one step, one behind the other; `nodes`: of a row's tree, 0: drafts are chains."""
        self._table = table
        self.proposer = proposer
        self.most_drafts = most_drafts
        self._nodes = nodes
        # of rows whose drafts the GPU has: the known tokens that these are behind; -1: it is to be told of them
        self._placed = np.full(table.view.max_rows, -1, np.int32)
        self._made = RUNTIME.loaded, 0  # kernels, and graphs of networks, when a step ended

    @property
    def wants_features(self) -> bool:
        """Whether a proposer continues the model's features."""
        return self.proposer.wants_features

    def release(self, rows: Sequence[int]) -> None:
        """These rows' sequences are over; to be called before the table takes in the next plan."""
        self.proposer.release(rows)

    def begin(self, plan: StepPlan) -> bool:
        """The table has taken in a plan: tell proposers of new rows, and the GPU, with the next patches, the drafts to
        be verified. Whether the step has to be waited for."""
        self.proposer.admit(plan.admits)
        for admit in plan.admits:
            self._placed[admit.row] = -1
        drafted = bool(plan.num_drafts.any())
        if drafted:
            known = self._table.host.num_tokens[plan.rows]
            if (away := self._placed[plan.rows] != known).any():
                self._table.send_many(plan.rows[away], known[away], plan.num_drafts[away])
        return drafted or plan.draft_limits is None or len(plan.draft_limits) > 0

    def follow(self, plan: StepPlan, num_runs: int = 1) -> bool:
        """The step has been sent, and rows stand as the host's table says: what can be drafted behind it on the GPU,
        before its tokens are known here, is sent too. Whether something was. `num_runs`: of the step, between which
        the same is to be drafted (`again`), as much as it verifies."""
        if not self.proposer.follows or (plan.draft_limits is not None and not len(plan.draft_limits)):
            return False  # nobody can, or is asked
        if self._nodes or not plan.yields.all() or (plan.lengths != 1 + plan.num_drafts).any():
            return False
        host, rows = self._table.host, plan.rows
        limits = np.minimum(host.sampling.max_drafts[rows], self.most_drafts)
        return self.proposer.follow(rows, host.num_computed[rows], plan.lengths, limits, plan.draft_limits, num_runs)

    def again(self) -> bool:
        """The same behind another run of the step."""
        return self.proposer.again()

    def finish(self, plan: StepPlan, result: StepResult, features: torch.Tensor | None) -> StepResult:
        """Take in what a step brought, and add to it what is drafted for the next. `features` [T, F]: what the model
        made of the step's tokens."""
        started = time.perf_counter()
        starts = self._table.host.num_computed[plan.rows]  # a copy
        self.commit(plan, result)
        if result.num_runs > 1:
            features = None  # what continues them has done so between the runs
        num_drafts, sources, values = self._propose(plan, starts, features)
        before, self._made = self._made, (RUNTIME.loaded, self.proposer.num_captures)
        passes, between = self.proposer.passes(), 0.0
        if result.num_runs > 1:  # passes that were made between runs, which the step's time holds, are drafting
            between = (result.num_runs - 1) * sum(each.seconds for each in passes)
            passes *= result.num_runs
        return replace(
            result,
            warming=result.warming or self._made != before,
            num_drafts=num_drafts,
            draft_sources=sources,
            draft_values=values,
            draft_passes=passes,
            draft_seconds=tuple(
                each + between * (source == self.proposer.follower) for source, each in enumerate(self.proposer.seconds)
            ),
            dropped=self.proposer.dropped(),
            times=replace(
                result.times,
                forward=max(0.0, result.times.forward - between),
                draft=time.perf_counter() - started + between,
            ),
        )

    def commit_late(
        self, plan: StepPlan, admissions: np.ndarray, features: torch.Tensor | None, result: StepResult
    ) -> StepResult:
        """The host's table takes in what a step brought that was not waited for, and proposers its features [T, F], of
        all its runs. `admissions` [S]: which of its requests each row had then; of rows that have changed hands nothing
        is taken."""
        kept = self.admissions(plan) == admissions
        whole = bool(kept.all())
        starts = self._table.host.num_computed[plan.rows] if features is not None else None
        if whole:
            self.commit(plan, result)
        else:
            self.commit(
                replace(plan, spans=plan.spans[:, kept], yields=plan.yields[kept]),
                replace(result, tokens=[tokens for tokens, stays in zip(result.tokens, kept, strict=True) if stays]),
            )
        if features is not None and starts is not None:
            rows = plan.rows if whole else np.where(kept, plan.rows, -1)
            host, told = self._table.host, self._features(rows, plan.lengths * plan.num_runs, starts, features)
            self.proposer.watch(DraftContext(rows, host.token_ids, host.num_tokens, limits=[], features=told))
        return result

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """The host's table takes in what a step brought."""
        table, host, count, rows = self._table, self._table.host, plan.num_spans, plan.rows
        counts = np.fromiter(map(len, result.tokens), np.int32, count)
        width = max(1, int(counts.max(initial=0)))
        drawn = list(chain.from_iterable(result.tokens))
        if len(drawn) == count * width:  # of all the same number
            tokens = np.array(drawn, np.int32).reshape(count, width)
        else:
            tokens = np.full((count, width), -1, np.int32)
            tokens[np.arange(width) < counts[:, None]] = drawn
        hosted = table.hosted[rows]
        known = host.num_tokens[rows] if hosted.any() else None
        host.commit(plan, Sampled(tokens, counts, {}))
        if known is not None:
            for span in np.flatnonzero(hosted).tolist():  # the GPU has the others' already
                row = int(rows[span])
                table.send_tokens(row, int(known[span]), min(int(host.num_tokens[row]), table.view.max_len))
                table.send_progress(row)

    def admissions(self, plan: StepPlan) -> np.ndarray:
        """int64 [S]: how many requests each span's row has had."""
        return self._table.host.sampling.admission[plan.rows]

    def _features(
        self, rows: np.ndarray, lengths: np.ndarray, starts: np.ndarray, values: torch.Tensor
    ) -> StepFeatures:
        query_start = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=query_start[1:])
        return StepFeatures(rows, starts, query_start, self._table.host.num_computed, values)

    def _propose(
        self, plan: StepPlan, starts: np.ndarray, values: torch.Tensor | None
    ) -> tuple[list[int], list[int], dict[int, list[float]]]:
        """Drafts for the next step: how many each span's row holds, by which proposer, and what nodes of trees
        promise."""
        host, rows, features = self._table.host, plan.rows[plan.yields], None
        if values is not None:
            features = self._features(plan.rows, plan.lengths, starts, values)
        context = DraftContext(
            rows,
            host.token_ids,
            host.num_tokens,
            limits=np.minimum(host.sampling.max_drafts[rows], self.most_drafts).tolist(),
            sampling=host.sampling,
            features=features,
            wanted=None if plan.draft_limits is None else plan.draft_limits[:, plan.yields],
            nodes=self._nodes,
        )
        drafts = self.proposer.propose(context)
        if drafts is not None:
            self._placed[rows] = host.num_tokens[rows] if drafts.placed else -1
        return told_of(plan, drafts, host.hold_drafts(rows, drafts))
