"""HeadRunner: an EAGLE head that follows the request table (models/draft_heads.py says what its entries are).

    position      0 ...  base        base + fed           num_tokens - 2   num_tokens - 1
    entries             |  computed  |  features kept       |
                        0            fed                    last: its output drafts the token of num_tokens

The model's features come with each step, for the tokens it ran. They are kept until the head is asked for drafts and
fed then, in place of what it made up before. Positions found in the prefix cache, or too far back to be kept, have
none: the head's sequence begins after them, which costs acceptance and nothing else.

For a tree of drafts (EAGLE-2, Li et al. 2024) the best nodes of each level become entries of their own, behind the one
of the last known token. All entries of the tree are run again for each level, as one span of tree attention.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np

from headrace.attention.base import AttentionBackend
from headrace.core.kv_layout import KVLayout
from headrace.core.kv_manager import KVCacheManager
from headrace.core.plan import Admit, DraftPass, NewBlocks, StepPlan
from headrace.core.request import Request
from headrace.models.draft_heads import EagleHead
from headrace.ops.xp import Array
from headrace.spec.base import DraftContext, StepFeatures
from headrace.worker.batch import BatchBuilder, StepBatch
from headrace.worker.kv_cache import KVCache
from headrace.worker.recorded import MAX_TOKENS, RecordedLauncher
from headrace.worker.table import RequestTable

_KEPT = 1024  # features of a row that wait to be fed
_WATCHED = 32  # steps whose features are given to their rows at once
_CHUNK = 256  # entries fed in one pass, but for the last
WIDTH = 4  # nodes of a level of a tree that are drafted on from


class HeadRow:
    """A sequence as the head knows it."""

    def __init__(self, admit: Admit):
        self.admit = admit
        self.base = admit.num_computed  # position of its first entry
        self.fed = 0  # entries computed from the model's features
        self.features: list[Any] = []  # [n, F] of the positions from base + fed on, in pieces
        self.num_kept = 0
        self.request = Request(str(admit.row), [0], admit.params, max_new_tokens=1)
        self.request.row = admit.row

    @property
    def next(self) -> int:
        """The position whose feature is wanted next."""
        return self.base + self.fed + self.num_kept


@dataclass
class _Grown:
    """Entries of a row's tree: that of the last known token, then nodes."""

    first: InitVar[np.ndarray]  # [1, H], what the first entry was made from
    made_first: InitVar[np.ndarray]  # [H], what came out
    inputs: list[np.ndarray] = field(init=False)
    made: list[np.ndarray] = field(init=False)
    parents: list[int] = field(default_factory=list)  # of nodes, as places

    def __post_init__(self, first: np.ndarray, made_first: np.ndarray) -> None:
        self.inputs, self.made = [first], [made_first]


class HeadFollower(ABC):
    """Follows the request table, on whatever device the head runs; the same calls as DraftFollower has."""

    def __init__(self, layout: KVLayout, table: RequestTable, max_len: int):
        """`table`: the head's own, of entries."""
        self.passes: list[DraftPass] = []
        self.kv = KVCacheManager(layout, prefix_caching=False)
        self._table = table
        self._max_len = max_len
        self._rows: dict[int, HeadRow] = {}
        self._near = 1  # entries that rows may be behind and run with their first draft
        self._usual = 1  # of these, those that a step with drafts leaves at most
        self._width = 1  # entries of each level of a draft

    def admit(self, admits: Sequence[Admit]) -> None:
        """See Proposer."""
        for admit in admits:
            self._rows[admit.row] = HeadRow(admit)
            self._table.num_computed[admit.row] = 0

    def release(self, rows: Sequence[int]) -> None:
        """See Proposer."""
        for number in rows:
            row = self._rows.pop(number, None)
            if row is not None:
                self.kv.free(row.request, after_step=-1)

    def begin(self, context: DraftContext, most: int) -> tuple[np.ndarray, np.ndarray]:
        """See DraftRunner."""
        self.passes = []
        self.kv.pool.settle(-1)
        self._near, self._width = most + 1, WIDTH if context.nodes else 1
        if context.features is not None:
            self._keep(context.features, context.num_tokens)
        chosen: list[int] = []
        depths: list[int] = []
        known_of = context.num_tokens[context.rows].tolist()
        for index, (number, known, limit) in enumerate(
            zip(context.rows.tolist(), known_of, context.limits, strict=True)
        ):
            row = self._rows[number]
            # entries count from `base` on, and drafts are put into the request table, which ends with the text
            depth = min(limit, most, self._max_len - (known - row.base), context.token_ids.shape[1] - known)
            entries = known - 1 - row.base
            if depth < 1 or entries < 1 or row.next != known - 1 or not row.num_kept:
                continue
            depth = min(depth, 1 + (self._max_len - entries) // self._width)
            if not self._allocate(row, entries + self._width * (depth - 1)):
                continue
            # those before have been fed
            self._table.token_ids[number, row.fed : entries] = context.token_ids[number, row.base + 1 + row.fed : known]
            chosen.append(index)
            depths.append(depth)
            if row.num_kept > self._near:
                self._catch_up(row)
        self._usual = 1 + max(depths, default=0)
        self._tokens = context.token_ids
        return np.array(chosen, np.int64), np.array(depths, np.int32)

    def watch(self, features: StepFeatures, num_tokens: np.ndarray) -> None:
        """Keep the features of a step after which nobody is asked for drafts, whose buffer is nobody else's."""
        self._keep(features, num_tokens)

    def end(self, rows: np.ndarray, drafts: np.ndarray) -> None:
        """See DraftRunner: entries that the head made up are computed anew from the model's features."""
        for number in rows.tolist():
            self._table.num_computed[number] = self._rows[number].fed

    def check(self) -> None:
        """The full account of the pool; raises AssertionError on a leak."""
        self.kv.pool.settle(-1)
        self.kv.check()

    # -- features

    def _keep(self, step: StepFeatures, num_tokens: np.ndarray) -> None:
        """Keep the features of a step's tokens, without those of drafts that were refused."""
        ends = np.minimum(num_tokens[step.rows] - 1, step.num_computed[step.rows]).tolist()  # of what stands
        for number, start, stands, first, end in zip(
            step.rows.tolist(), step.starts.tolist(), ends, step.query_start[:-1].tolist(),
            step.query_start[1:].tolist(), strict=True,
        ):  # fmt: skip
            row = self._rows.get(number)
            count = min(end - first, stands - start)
            if row is None or count < 1:
                continue
            self._append(row, start, self._cut(step.values, first, count), count)

    def _append(self, row: HeadRow, start: int, features: Any, count: int = 1) -> None:
        """Features of `count` tokens from position `start` on."""
        if start != row.next or row.num_kept + count > _KEPT:
            self._begin_at(row, start)
        row.features.append(features)
        row.num_kept += count

    def _begin_at(self, row: HeadRow, position: int) -> None:
        """Forget all entries: the sequence begins anew at a position."""
        self.kv.free(row.request, after_step=-1)
        row.request.num_slots = 0
        row.base, row.fed, row.features, row.num_kept = position, 0, [], 0
        self._table.num_computed[row.request.row] = 0

    def _allocate(self, row: HeadRow, num_entries: int) -> bool:
        if num_entries <= row.request.num_slots:
            return True
        news = self.kv.allocate(row.request, num_entries, [])
        self._place(news or ())
        return news is not None

    def _place(self, news: Sequence[NewBlocks]) -> None:
        for new in news:
            self._table.block_tables[new.group][new.row, new.start : new.start + len(new.ids)] = new.ids

    @abstractmethod
    def _cut(self, values: Array, first: int, count: int) -> Any:
        """A piece of a step's features, to be kept: the step's own will be overwritten."""

    @abstractmethod
    def _catch_up(self, row: HeadRow) -> None:
        """Before a row drafts: run entries of features that have gathered, until at most `_near` are left."""


class HeadRunner(HeadFollower):
    """Runs an EAGLE head over rows of the request table; the same calls as DraftRunner has."""

    def __init__(self, head: EagleHead, layout: KVLayout, backend: AttentionBackend, num_rows: int, max_len: int):
        table = RequestTable(num_rows, max_len, len(layout.groups), layout.block_size)
        super().__init__(layout, table, min(max_len, head.spec.max_position))
        self.model = head
        self._cache = KVCache(layout, backend.caps.whole_blocks)
        self._backend = backend
        self._builder = BatchBuilder(self._table, layout.block_size)
        self._launcher = RecordedLauncher(self._forward)
        # features of the pass being run; those of a pass that may be recorded always lie in the same memory
        self._fixed = np.zeros((MAX_TOKENS, head.spec.hidden_size), np.float32)
        self._made = np.zeros((num_rows, head.spec.hidden_size), np.float32)  # by row, what its last entry made
        self._grown: dict[int, _Grown] = {}
        self._watched: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # (rows, positions, features) of steps
        self._inputs: Array = self._fixed
        self._outputs: Array = self._fixed

    def admit(self, admits: Sequence[Admit]) -> None:
        self._sort()
        super().admit(admits)

    def release(self, rows: Sequence[int]) -> None:
        self._sort()
        super().release(rows)

    def begin(self, context: DraftContext, most: int) -> tuple[np.ndarray, np.ndarray]:
        self._sort()
        return super().begin(context, most)

    def watch(self, features: StepFeatures, num_tokens: np.ndarray) -> None:
        if len(features.values) == len(features.rows):  # most steps: single tokens, all of which stand
            self._watched.append((features.rows, features.starts, np.array(features.values, np.float32)))
            if len(self._watched) >= _WATCHED:
                self._sort()
            return
        self._sort()
        super().watch(features, num_tokens)

    def _sort(self) -> None:
        """Give the features of watched steps to their rows."""
        watched, self._watched = self._watched, []
        for rows, starts, values in watched:
            for index, (number, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
                if (row := self._rows.get(number)) is not None:
                    self._append(row, start, values[index : index + 1].copy())  # a view would keep the others' too

    def step(self, rows: np.ndarray, ends: np.ndarray) -> Array:
        """See DraftRunner, but scores are of the head's vocabulary: the entry whose token is the last of each row's
        first `ends` tokens, after those of features that are not fed yet."""
        started = time.perf_counter()
        own = [self._rows[number] for number in rows.tolist()]
        lengths = np.array([row.num_kept or 1 for row in own], np.int32)
        if own[0].num_kept:  # the first of a call: all rows have some, whose tokens are in the table
            inputs = self._take(own, lengths)
        else:
            self._table.token_ids[rows, self._table.num_computed[rows]] = self._tokens[rows, ends - 1]
            inputs = self._made[rows]
        hidden = self._run(rows, lengths, inputs)
        scores = self.model.scores(hidden)
        self._made[rows] = self._outputs
        if self._width > 1:
            for number, last in zip(rows.tolist(), np.cumsum(lengths).tolist(), strict=True):
                self._grown[number] = _Grown(inputs[last - 1 : last], self._made[number].copy())
        if int(lengths.max()) <= self._usual:
            self.passes.append(DraftPass(len(rows), time.perf_counter() - started))
        return scores

    def grow(self, rows: np.ndarray, news: Sequence[Sequence[tuple[int, int]]]) -> Array:
        """Scores [N, draft vocabulary] behind new nodes of the rows' trees, which `step` began with the entry of the
        last known token.

        `news` of each row are (place of the parent, token); places count that first entry, 0, then nodes as they came.
        """
        started = time.perf_counter()
        inputs: list[np.ndarray] = []
        lengths = np.ones(len(rows), np.int32)
        for index, (number, nodes) in enumerate(zip(rows.tolist(), news, strict=True)):
            grown, first = self._grown[number], self._rows[number].fed
            for parent, token in nodes:
                self._table.token_ids[number, first + len(grown.parents)] = token
                grown.inputs.append(grown.made[parent][None])
                grown.parents.append(parent)
            inputs += grown.inputs
            lengths[index] += len(grown.parents)
            self._table.draft_parents[number] = np.array(grown.parents)
            self._table.num_computed[number] = first - 1
        hidden = self._run(rows, lengths, np.concatenate(inputs), trees=True)
        fresh: list[int] = []
        for number, nodes, end in zip(rows.tolist(), news, np.cumsum(lengths).tolist(), strict=True):
            fresh += range(end - len(nodes), end)
            self._grown[number].made += list(np.array(self._outputs[end - len(nodes) : end]))
        scores = self.model.scores(hidden[np.array(fresh)])
        self.passes.append(DraftPass(len(fresh), time.perf_counter() - started))
        return scores

    def _cut(self, values: Array, first: int, count: int) -> Array:
        return np.array(values[first : first + count], np.float32)

    def _take(self, rows: list[HeadRow], counts: np.ndarray) -> Array:
        """The next `counts` [R] kept features of rows, one behind the other, as the head continues them [T, H]."""
        taken: list[Array] = []
        for row, count in zip(rows, counts.tolist(), strict=True):
            values = row.features[0] if len(row.features) == 1 else np.concatenate(row.features)
            row.features = [values[count:]] if count < len(values) else []
            row.num_kept -= count
            row.fed += count
            taken.append(values[:count])
        return self.model.fuse(taken[0] if len(taken) == 1 else np.concatenate(taken))

    def _catch_up(self, row: HeadRow) -> None:
        number = np.array([row.request.row])
        while row.num_kept > self._near:
            counts = np.array([min(row.num_kept - 1, _CHUNK)], np.int32)
            self._run(number, counts, self._take([row], counts))

    # -- the head

    def _run(self, rows: np.ndarray, lengths: np.ndarray, features: Array, trees: bool = False) -> Array:
        """Hidden states [R, H] of each row's last entry of a pass; of all entries, where spans are `trees`."""
        spans = np.zeros((4, len(rows)), np.int32)
        spans[0], spans[1], spans[2] = rows, self._table.num_computed[rows], lengths
        if trees:
            spans[3] = lengths - 1
        plan = StepPlan(0, spans=spans, yields=np.ones(len(rows), bool))
        batch = self._builder.build(plan, self._launcher.pick(plan.num_tokens, plan.num_spans, None))
        metas = [self._backend.plan(batch, g, group) for g, group in enumerate(self._cache.layout.groups)]
        self._inputs = features
        if len(features) <= MAX_TOKENS:
            self._inputs = self._fixed[: len(features)]
            self._inputs[:] = features
        made, hidden = self._launcher.run(batch, metas)
        self._table.num_computed[rows] += lengths
        if len(made) == len(batch.logit_index):
            self._outputs = made
            return hidden
        self._outputs = made[batch.logit_index]
        return hidden[batch.logit_index]

    def _forward(self, batch: StepBatch, metas: list[Any]) -> tuple[Array, Array]:
        settings = self.model.attention_layers

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            return self._backend.run(q, k, v, self._cache.pages(layer), metas[0], settings[layer])

        return self.model.forward(batch.token_ids, self._inputs, batch.positions, attend)
