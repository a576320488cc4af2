"""Logits stages: what changes the distribution before a token is drawn, in a fixed order.

A stage may overwrite the logits it is given. It depends on its own row alone, so company cannot change a result. What
precedes a position is read from the request table, where drafts follow the known tokens: along a draft, penalties and
bans move with it and keep no state of their own. Of a token tree each path is a draft of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from headrace.ops.xp import Array, namespace
from headrace.sampling.state import SamplingBatch


class LogitsStage(Protocol):
    """One change of the logits."""

    def active(self, batch: SamplingBatch) -> bool:
        """Whether any row of the batch asks for it."""
        ...

    def apply(self, logits: Array, batch: SamplingBatch) -> Array:
        """Changed logits float32 [L, V]."""
        ...


class MinTokens:
    """Tokens that would end a request are impossible until it has min_tokens tokens."""

    def active(self, batch: SamplingBatch) -> bool:
        return bool(self._early(batch).any())

    @staticmethod
    def _early(batch: SamplingBatch) -> Array:
        return batch.positions < batch.table.first_free[batch.rows]

    def apply(self, logits: Array, batch: SamplingBatch) -> Array:
        for index in self._early(batch).nonzero()[0].tolist():
            _ban(logits, index, batch.table.stop_ids[int(batch.rows[index])])
        return logits


class AllowedTokens:
    """Every token but those allowed is impossible."""

    def active(self, batch: SamplingBatch) -> bool:
        return bool(batch.table.limited[batch.rows].any())

    def apply(self, logits: Array, batch: SamplingBatch) -> Array:
        xp = namespace(logits)
        for index in batch.table.limited[batch.rows].nonzero()[0].tolist():
            ids = xp.asarray(batch.table.allowed_ids[int(batch.rows[index])])
            kept = logits[index, ids]
            logits[index, :] = -xp.inf
            logits[index, ids] = kept
        return logits


class BadWordTokens:
    """A token that would finish a bad word of the output is impossible. The prompt does not begin one."""

    def active(self, batch: SamplingBatch) -> bool:
        return bool(batch.table.censored[batch.rows].any())

    def apply(self, logits: Array, batch: SamplingBatch) -> Array:
        for index in batch.table.censored[batch.rows].nonzero()[0].tolist():
            row, end = int(batch.rows[index]), int(batch.positions[index])
            words = batch.table.bad_words[row]
            start = max(int(batch.table.prompt_len[row]), end - words.longest)
            _ban(logits, index, words.banned(batch.before(index, start).tolist()))
        return logits


class Penalties:
    """Repetition over prompt and output (a positive logit is divided by it, another multiplied: Keskar et al., CTRL,
    2019), then presence and frequency over the output (what OpenAI's API documents)."""

    def active(self, batch: SamplingBatch) -> bool:
        return bool(batch.table.penalised[batch.rows].any())

    def apply(self, logits: Array, batch: SamplingBatch) -> Array:
        xp, table = namespace(logits), batch.table
        for index in table.penalised[batch.rows].nonzero()[0].tolist():
            row = int(batch.rows[index])
            history = xp.asarray(batch.before(index), dtype=xp.int64)
            repetition = float(table.repetition[row])
            if repetition != 1:
                before = logits[index, history]  # a token that occurs twice is read and written twice, with one value
                logits[index, history] = xp.where(before > 0, before / repetition, before * repetition)
            presence, frequency = float(table.presence[row]), float(table.frequency[row])
            if presence != 0 or frequency != 0:
                ids, counts = xp.unique_counts(history[int(table.prompt_len[row]) :])
                logits[index, ids] = logits[index, ids] - (presence + frequency * xp.astype(counts, logits.dtype))
        return logits


class LogitBias:
    """A number added to the logits of named tokens."""

    def active(self, batch: SamplingBatch) -> bool:
        return bool(batch.table.biased[batch.rows].any())

    def apply(self, logits: Array, batch: SamplingBatch) -> Array:
        xp = namespace(logits)
        for index in batch.table.biased[batch.rows].nonzero()[0].tolist():
            ids, values = map(xp.asarray, batch.table.bias[int(batch.rows[index])])
            logits[index, ids] = logits[index, ids] + values
        return logits


class Temperature:
    """Logits relative to the best one, divided by the temperature; greedy rows (0) are left alone."""

    def active(self, batch: SamplingBatch) -> bool:
        return bool((batch.table.temperature[batch.rows] > 0).any())

    def apply(self, logits: Array, batch: SamplingBatch) -> Array:
        xp = namespace(logits)
        temperature = xp.asarray(batch.table.temperature[batch.rows])[:, None]
        best = xp.max(logits, axis=-1, keepdims=True)
        # the best logit becomes exactly 0, so that the smallest temperature overflows to -inf and never to NaN; where
        # nothing is possible (best is -inf) everything stays -inf
        shifted = logits - xp.where(best == -xp.inf, 0.0, best)
        return xp.where(temperature > 0, shifted / xp.where(temperature > 0, temperature, 1.0), logits)


class Truncation:
    """top_k, then top_p over what is left, then min_p: everything under a row's threshold becomes impossible.

    Thresholds keep ties: tokens as likely as the last one kept are kept too. Comes after Temperature, so the best
    logit of a row is 0.
    """

    def active(self, batch: SamplingBatch) -> bool:
        return bool(self._wanted(batch).any())

    @staticmethod
    def _wanted(batch: SamplingBatch) -> Array:
        table, rows = batch.table, batch.rows
        cut = (table.top_k[rows] > 0) | (table.top_p[rows] < 1) | (table.min_p[rows] > 0)
        return cut & (table.temperature[rows] > 0)

    def apply(self, logits: Array, batch: SamplingBatch) -> Array:
        xp = namespace(logits)
        for index in self._wanted(batch).nonzero()[0].tolist():
            row = int(batch.rows[index])
            top_k, top_p = int(batch.table.top_k[row]), float(batch.table.top_p[row])
            values = logits[index]
            if 0 < top_k < values.shape[0] or top_p < 1:
                found = _at_least_kth(values, top_k)
                # -inf or NaN: there is nothing to draw from, which the sampler will say
                if not found.shape[0] or xp.max(found) != 0:
                    continue
                least = _nucleus_end(found, top_p) if top_p < 1 else xp.min(found)
                values = xp.where(values < least, -xp.inf, values)
            min_p = float(batch.table.min_p[row])
            if min_p > 0:
                values = xp.where(values < xp.log(xp.asarray(min_p, dtype=values.dtype)), -xp.inf, values)
            logits[index] = values
        return logits


def _at_least_kth(values: Array, k: int) -> Array:
    """Those of values [V] that are as large as the k-th largest, in any order; all of them where k is 0 or >= V.

    They are cheaper to sort than a vocabulary.
    """
    if not 0 < k < values.shape[0]:
        return values
    kth = np.partition(values, -k)[-k] if isinstance(values, np.ndarray) else values.topk(k).values[-1]
    return values[values >= kth]


def _nucleus_end(values: Array, top_p: float) -> Array:
    """The smallest of the fewest logits whose share of the probability reaches `top_p` < 1. `values` [n]: the largest
    is 0.

    Only the largest are sorted, as many as hold that share: a language model leaves a few hundred of them in most
    places, and sorting a vocabulary costs more than all else that sampling does.
    """
    xp = namespace(values)
    weights = xp.exp(values)
    # summed in float64, since a float32 sum over a vocabulary would move the cut
    wanted = top_p * xp.sum(weights, dtype=xp.float64)
    largest = values
    for depth in (3.0, 5.0, 7.0, 9.0, 12.0):
        inside = values >= -depth
        if xp.sum(weights[inside], dtype=xp.float64) >= wanted:
            largest = values[inside]
            break
    ordered = xp.flip(xp.sort(largest))
    reached = xp.cumulative_sum(xp.exp(ordered), dtype=xp.float64)
    # as many as have less than the share before them
    return ordered[int(xp.count_nonzero(reached[:-1] < wanted))]


def _ban(logits: Array, index: int, ids: Iterable[int]) -> None:
    """Make tokens of one row impossible; ids beyond the model's vocabulary already are."""
    inside = [token for token in ids if token < logits.shape[1]]
    if inside:
        logits[index, namespace(logits).asarray(np.array(inside, np.int64))] = -np.inf


def default_stages(bans: Sequence[LogitsStage] = ()) -> list[LogitsStage]:
    """The stages in their order, which `SamplingParams` explains, with more bans after those known here."""
    options: list[LogitsStage] = [Penalties(), LogitBias(), Temperature(), Truncation()]
    return [MinTokens(), AllowedTokens(), BadWordTokens(), *bans, *options]
