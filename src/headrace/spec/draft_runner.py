"""DraftRunner: a second model that follows the request table, for proposers that run a network.

It has blocks, a pool and a prefix cache of its own (core/kv_manager.py, as the engine has), and shares the request
table's tokens. Of a row it knows

    token_ids   | known tokens, computed | known, not computed | drafts of the last call ... |
                0                        ^ num_computed        ^ num_tokens

After a verification the drafts that were accepted are known tokens, and computed already; from the first that was not,
positions are computed anew. Only known tokens are entered into the prefix cache. A row that is far behind (its prompt
was prefilled, or found in the engine's prefix cache) catches up, by a chunk of prompt a call, and has no drafts until
then; in the step of its first token it is left alone, so that the first token does not wait. When blocks are short a
row has no drafts.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from headrace.attention.base import AttentionBackend
from headrace.core.kv_layout import KVLayout
from headrace.core.kv_manager import KVCacheManager
from headrace.core.plan import Admit, DraftPass, NewBlocks, StepPlan
from headrace.core.request import Request
from headrace.models.blocks import CausalLM
from headrace.ops.xp import Array
from headrace.spec.base import DraftContext
from headrace.worker.batch import BatchBuilder, StepBatch
from headrace.worker.kv_cache import KVCache
from headrace.worker.recorded import RecordedLauncher
from headrace.worker.table import RequestTable

_CHUNK = 256  # tokens of prompts that rows may catch up with in one call
NEAR = 32  # tokens that a row may be behind and draft in the same call


class _Row:
    """A sequence as the draft model knows it. `request.num_computed` counts known tokens only."""

    def __init__(self, admit: Admit):
        self.request = Request(
            str(admit.row), admit.token_ids, admit.params, max_new_tokens=1, cache_salt=admit.cache_salt
        )
        self.request.row = admit.row
        self.drafts: list[int] = []  # tokens computed behind the known ones, in the last call
        self.met = False  # a first call has passed


class Pages(Protocol):
    """What the bookkeeping needs of a cache of whatever device."""

    def copy_blocks(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy whole blocks (source, destination)."""
        ...


class DraftFollower(ABC):
    """Follows the request table, on whatever device the model runs."""

    def __init__(self, layout: KVLayout, cache: Pages, table: RequestTable, max_len: int, chunk: int = _CHUNK):
        """`table`: the model's own, whose tokens become the request table's; `chunk`: tokens of prompts that rows may
        catch up with in one call."""
        self.passes: list[DraftPass] = []  # of the last call
        self.kv = KVCacheManager(layout)
        self._cache = cache
        self._table = table
        self._max_len = max_len
        self._chunk = chunk
        self._rows: dict[int, _Row] = {}

    def admit(self, admits: Sequence[Admit]) -> None:
        """See Proposer."""
        for admit in admits:
            self._rows[admit.row] = _Row(admit)

    def release(self, rows: Sequence[int]) -> None:
        """See Proposer."""
        for number in rows:
            row = self._rows.pop(number, None)
            if row is not None:
                self.kv.free(row.request, after_step=-1)

    def begin(self, context: DraftContext, most: int) -> tuple[np.ndarray, np.ndarray]:
        """(indices into context.rows int64 [R], depths int32 [R]) of the rows that can draft now, with blocks for so
        many drafts, at most `most`."""
        self.passes = []
        self._table.token_ids = context.token_ids
        near: list[int] = []
        depths: list[int] = []
        far: list[_Row] = []
        known_of = context.num_tokens[context.rows].tolist()
        for index, (number, known, limit) in enumerate(
            zip(context.rows.tolist(), known_of, context.limits, strict=True)
        ):
            row = self._rows[number]
            if not row.met:
                row.met = True
                continue
            depth = min(limit, most, self._max_len - known)
            if depth < 1:
                continue
            self._take_in(row, context.token_ids[number], known)
            if known - row.request.num_computed > NEAR:
                far.append(row)
            elif self._allocate(row, known + depth - 1):
                near.append(index)
                depths.append(depth)
        self._catch_up(far)
        return np.array(near, np.int64), np.array(depths, np.int32)

    def end(self, rows: np.ndarray, drafts: np.ndarray) -> None:
        """`drafts` int32 [R, K] (-1 pads) were drawn; all but the last of each row were also computed."""
        computed = self._table.num_computed[rows].tolist()
        for number, tokens, reached in zip(rows.tolist(), drafts.tolist(), computed, strict=True):
            row = self._rows[number]
            known = len(row.request.token_ids)
            row.request.num_computed = known
            row.drafts = tokens[: reached - known]
            self.kv.advance(row.request, after_step=-1)

    def check(self) -> None:
        """The full account of the pool; raises AssertionError on a leak."""
        self.kv.pool.settle(-1)
        self.kv.check()

    # -- following the request table

    def _take_in(self, row: _Row, tokens: np.ndarray, known: int) -> None:
        """Take over tokens that have become known, and what of the last drafts they confirm."""
        request = row.request
        before = len(request.token_ids)
        news: list[int] = tokens[before:known].tolist()
        request.token_ids += news
        if request.num_computed == 0 and not request.num_slots:
            self._place(self.kv.adopt(request, self.kv.match(request)))
        confirmed = 0
        for draft, token in zip(row.drafts, news, strict=False):
            if draft != token:
                break
            confirmed += 1
        row.drafts = []
        request.num_computed = min(request.num_computed + confirmed, known - 1)  # the last one's logits are wanted
        self._table.num_computed[request.row] = request.num_computed

    def _allocate(self, row: _Row, num_tokens: int) -> bool:
        """Blocks for the row's first `num_tokens` tokens; False if they are short."""
        if num_tokens <= row.request.num_slots:
            return True
        self.kv.pool.settle(-1)  # what was given back is free: passes run in the order in which they are sent
        copies: list[tuple[int, int]] = []
        news = self.kv.allocate(row.request, num_tokens, copies)
        if news is None:
            return False
        self._cache.copy_blocks(tuple(copies))
        self._place(news)
        return True

    def _place(self, news: Sequence[NewBlocks]) -> None:
        for new in news:
            self._table.block_tables[new.group][new.row, new.start : new.start + len(new.ids)] = new.ids

    def _catch_up(self, far: list[_Row]) -> None:
        budget = self._chunk
        rows, lengths = [], []
        for row in far:
            request = row.request
            length = min(budget, len(request.token_ids) - 1 - request.num_computed)
            if length > 0 and self._allocate(row, request.num_computed + length):
                budget -= length
                rows.append(request.row)
                lengths.append(length)
        if not rows:
            return
        self._run(np.array(rows, np.int32), np.array(lengths, np.int32))
        for number in rows:
            request = self._rows[number].request
            request.num_computed = int(self._table.num_computed[number])
            self.kv.advance(request, after_step=-1)

    @abstractmethod
    def _run(self, rows: np.ndarray, lengths: np.ndarray) -> Any:
        """Run each row's next tokens through the model."""


class DraftRunner(DraftFollower):
    """Runs the draft model over rows of the request table."""

    def __init__(self, model: CausalLM, layout: KVLayout, backend: AttentionBackend, num_rows: int, max_len: int):
        table = RequestTable(num_rows, max_len, len(layout.groups), layout.block_size)
        self._pages = KVCache(layout, backend.caps.whole_blocks)
        super().__init__(layout, self._pages, table, min(max_len, model.spec.max_position))
        self.model = model
        self._backend = backend
        self._builder = BatchBuilder(self._table, layout.block_size)
        self._launcher = RecordedLauncher(self._forward)

    def step(self, rows: np.ndarray, ends: np.ndarray) -> Array:
        """Run rows up to their first `ends` [R] tokens; logits float32 [R, V] of each one's last position."""
        started = time.perf_counter()
        lengths = ends - self._table.num_computed[rows]
        hidden, batch = self._run(rows, lengths)
        logits = self.model.logits(hidden[batch.logit_index])
        if int(lengths.max()) <= 2:  # a token, and after a whole accepted draft its last one; others catch up
            self.passes.append(DraftPass(len(rows), time.perf_counter() - started))
        return logits

    def _run(self, rows: np.ndarray, lengths: np.ndarray) -> tuple[Array, StepBatch]:
        """Hidden states [T, H] of each row's next tokens."""
        spans = np.zeros((4, len(rows)), np.int32)
        spans[0], spans[1], spans[2] = rows, self._table.num_computed[rows], lengths
        plan = StepPlan(0, spans=spans, yields=np.ones(len(rows), bool))
        batch = self._builder.build(plan, self._launcher.pick(plan.num_tokens, plan.num_spans, None))
        metas = [self._backend.plan(batch, g, group) for g, group in enumerate(self._pages.layout.groups)]
        hidden = self._launcher.run(batch, metas)
        self._table.num_computed[rows] += lengths
        return hidden, batch

    def _forward(self, batch: StepBatch, metas: list[Any]) -> Array:
        layers = self.model.attention_layers

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            meta = metas[self._pages.group(layer)]
            return self._backend.run(q, k, v, self._pages.pages(layer), meta, layers[layer])

        return self.model.forward(batch.token_ids, batch.positions, attend)
