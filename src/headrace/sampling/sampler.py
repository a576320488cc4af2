"""The sampler, which is also the verifier.

The token at a position is always argmax(logits after every stage + Gumbel noise of (seed, choice, position)); greedy
rows have no noise. A draft is accepted when it equals that token. So a request's text depends on its own key and logits
alone: batching, chunking, preemption and speculation cannot change it. Sampling without drafts is verification with
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace import ops
from headrace.core.plan import TokenLogprobs
from headrace.ops.xp import Array, namespace
from headrace.sampling.logprobs import best_continuations, by_span, token_logprobs
from headrace.sampling.params import NONE_ALLOWED
from headrace.sampling.stages import LogitsStage, default_stages
from headrace.sampling.state import SamplingBatch, TreeRows

DAMAGED = "the model's logits are not finite here; the weights or the KV cache are damaged"


@dataclass(frozen=True)
class Sampled:
    """What came out for R spans; K is the longest draft."""

    tokens: np.ndarray  # int32 [R, K+1]; -1 pads
    counts: np.ndarray  # int32 [R]  tokens of each span: 0 if it yields none, else accepted drafts + 1
    errors: dict[int, str]  # span -> why no token could be drawn; it has none then
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # span -> of each token, where asked for
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)  # span of a beam -> its best next
    # bool [L]: rows of logits whose token was taken: of a tree those on the accepted path
    taken: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))


def _walk(trees: TreeRows, chosen: np.ndarray, drawn: np.ndarray, taken: np.ndarray, column: np.ndarray) -> None:
    """Write into bool `taken` [L] which rows of trees are on the accepted path, and into `column` [L] how deep each is.

    A row is on it where the one before it is and drew this row's draft (SpecInfer, Miao et al. 2023, section 4.3; here
    the target's token is that of its position's noise, so nothing is drawn twice).
    """
    for index in np.flatnonzero(trees.parents > -2).tolist():
        parent = int(trees.parents[index])
        column[index] = 0 if parent < 0 else column[parent] + 1
        arrived = parent < 0 or (taken[parent] and chosen[parent] == trees.tokens[index])
        taken[index] = arrived and drawn[index]


def _masked(batch: SamplingBatch) -> Array:
    """bool [L]: some tokens may be impossible by the request's own wish."""
    table, rows = batch.table, batch.rows
    early = batch.positions < table.first_free[rows]
    return early | table.limited[rows] | table.censored[rows] | table.constrained[rows]


class Sampler:
    """Draws tokens and judges drafts."""

    def __init__(self, stages: Sequence[LogitsStage] | None = None):
        self.stages = list(stages) if stages is not None else default_stages()

    def draw(self, logits: Array, batch: SamplingBatch) -> tuple[Array, Array, Array]:
        """(token int64 [L], its logit after the stages float32 [L], all of them [L, V]) for logits float32 [L, V],
        which are used up.

        Where that logit is not finite there was nothing to draw: -inf says that the stages left no token, NaN that the
        model's own logits hold none, a NaN or +inf; also where a ban hides it, so that options do not decide.
        """
        xp = namespace(logits)
        places = xp.arange(logits.shape[0], device=logits.device)
        if batch.is_plain:
            chosen = xp.argmax(logits, axis=-1)
            return chosen, logits[places, chosen], logits
        masked = _masked(batch).nonzero()[0]
        damaged = masked[~np.asarray(xp.isfinite(xp.max(logits[masked], axis=-1)))] if masked.shape[0] else masked
        with np.errstate(over="ignore", invalid="ignore"):  # tiny temperatures overflow to -inf by design
            for stage in self.stages:
                if stage.active(batch):
                    logits = stage.apply(logits, batch)
        chosen = xp.argmax(logits, axis=-1)
        warm = (batch.table.temperature[batch.rows] > 0).nonzero()[0]
        if warm.shape[0]:
            noise = self._noise(batch, warm, logits.shape[1], xp)
            chosen[warm] = xp.argmax(logits[warm] + noise, axis=-1)
        scores = logits[places, chosen]
        scores[damaged] = xp.nan
        return chosen, scores, logits

    def likeliest(
        self, staged: Array, batch: SamplingBatch, count: int, noise: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int64 [L, count], their shares float32 [L, count]), best first, of logits [L, V] after `draw`.

        A share is what the position's noise leaves of a token, softmax(logits + noise); the first is what `draw` chose.
        Without `noise`: the probabilities themselves.
        """
        scores = np.array(staged)
        warm = np.flatnonzero((batch.table.temperature[batch.rows] > 0) & noise)
        if len(warm):
            scores[warm] += np.asarray(self._noise(batch, warm, scores.shape[1], np))
        rows, count = np.arange(len(scores)), min(count, scores.shape[1])
        ids, values = np.zeros((len(scores), count), np.int64), np.zeros((len(scores), count), np.float32)
        best = scores.max(1, keepdims=True)
        mass = np.exp(scores - np.where(np.isfinite(best), best, 0.0)).sum(1)
        for rank in range(count):  # a partition takes tens of times as long where most are equal, impossible
            ids[:, rank] = scores.argmax(1)
            values[:, rank] = scores[rows, ids[:, rank]]
            scores[rows, ids[:, rank]] = -np.inf
        shares = np.exp(values - np.where(np.isfinite(best), best, 0.0)) / np.maximum(mass, 1e-30)[:, None]
        return ids, np.nan_to_num(shares, posinf=0.0).astype(np.float32)

    @staticmethod
    def _noise(batch: SamplingBatch, warm: Array, vocab: int, xp: Any) -> Array:
        """Noise [W, V] of the places `warm` of the batch."""
        rows = batch.rows[warm]
        return ops.gumbel_noise(
            xp.arange(vocab, dtype=xp.int64),
            xp.asarray(batch.positions[warm], dtype=xp.int64),
            xp.asarray(batch.table.seed[rows]),
            xp.asarray(batch.table.choice[rows] + (batch.stream << 16)),
        )

    def judge(
        self,
        chosen: np.ndarray,
        drawn: np.ndarray,
        staged: Array,
        batch: SamplingBatch,
        spans: np.ndarray,
        drafts: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int64 [L], bool [L]: the draft is accepted) of tokens `chosen` from logits `staged` [L, V], where
        `drawn` [L] says that there was something to draw; `spans` and `drafts` as in `sample`."""
        return chosen, (drafts >= 0) & (drafts == chosen)

    def sample(
        self, logits: Array, batch: SamplingBatch, spans: np.ndarray, num_spans: int, drafts: np.ndarray | None
    ) -> Sampled:
        """Tokens of each span. `spans` int32 [L] names the span of each row of logits (ascending, a span's rows in
        order of position); `drafts` int32 [L] is the draft that follows each position, -1 for none and in trees, which
        `batch` describes; None: each span has one position, and no draft.

        A span ends before the first position where nothing can be drawn; it is in error if that is its first one.
        With drafts, a later such position is met again, as a first one, by the step that follows.
        """
        if not logits.shape[0]:
            return Sampled(np.full((num_spans, 1), -1, np.int32), np.zeros(num_spans, np.int32), {})
        plain = batch.is_plain
        if not plain:
            reported = np.flatnonzero(batch.table.logprobs[batch.rows] >= 0)
            untouched = logits[reported]  # a copy: the stages overwrite the logits
        chosen_dev, scores_dev, staged = self.draw(logits, batch)
        chosen, scores = np.asarray(chosen_dev), np.asarray(scores_dev)
        drawn = np.isfinite(scores)
        whole = bool(drawn.all())
        single = drafts is None or (len(spans) == num_spans and int(drafts.max()) < 0 and batch.trees is None)
        if plain and whole and single:  # a plain decode step
            return Sampled(chosen.astype(np.int32)[:, None], np.ones(num_spans, np.int32), {})
        if drafts is None:
            drafts = np.full(num_spans, -1, np.int32)
        first = np.searchsorted(spans, spans)  # index of the first row of each row's span
        chosen, agreed = self.judge(chosen, drawn, staged, batch, spans, drafts)
        # a position counts if every one before it in its span was drawn and agreed with the draft
        broken = np.concatenate([[0], np.cumsum(~(drawn & agreed))])
        counted = drawn & (broken[:-1] == broken[first])
        column = np.arange(len(spans)) - first
        if batch.trees is not None:
            _walk(batch.trees, chosen, drawn, counted, column)
        tokens = np.full((num_spans, 1 + int(column.max())), -1, np.int32)
        tokens[spans[counted], column[counted]] = chosen[counted]
        counts = np.bincount(spans[counted], minlength=num_spans).astype(np.int32)
        errors = {} if whole else self._errors(scores, batch, spans, ~drawn & (column == 0))
        if plain:
            return Sampled(tokens, counts, errors, taken=counted)
        kept = counted[reported]
        told = reported[kept]
        wanted = batch.table.logprobs[batch.rows[told]].tolist()
        entries = token_logprobs(untouched[kept.nonzero()[0]], chosen[told].tolist(), wanted)
        searched = np.flatnonzero(batch.table.candidates[batch.rows] * drawn)
        wanted = batch.table.candidates[batch.rows[searched]].tolist()
        candidates = {
            int(spans[index]): best_continuations(staged[index], count)
            for index, count in zip(searched.tolist(), wanted, strict=True)
        }
        return Sampled(tokens, counts, errors, by_span(spans[told], entries), candidates, counted)

    @staticmethod
    def _errors(scores: np.ndarray, batch: SamplingBatch, spans: np.ndarray, lost: np.ndarray) -> dict[int, str]:
        """Why nothing could be drawn in the first rows of spans that bool `lost` [L] names."""
        masked = _masked(batch)
        return {
            int(spans[index]): NONE_ALLOWED if scores[index] == -np.inf and masked[index] else DAMAGED
            for index in np.flatnonzero(lost).tolist()
        }
