"""Logits stages: what changes the distribution before a token is drawn, in a fixed order.

A stage may overwrite the logits it is given. It depends on its own row alone, so company cannot change a result.
"""

from __future__ import annotations

from typing import Protocol

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
        return bool((batch.positions < batch.table.first_free[batch.rows]).any())

    def apply(self, logits: Array, batch: SamplingBatch) -> Array:
        xp = namespace(logits)
        early = batch.positions < batch.table.first_free[batch.rows]
        for index in early.nonzero()[0].tolist():
            banned = [t for t in batch.table.stop_ids[int(batch.rows[index])] if t < logits.shape[1]]
            if banned:
                logits[index, xp.asarray(banned)] = -xp.inf
        return logits


class Temperature:
    """Logits relative to the best one, divided by the temperature; greedy rows (0) are left alone."""

    def active(self, batch: SamplingBatch) -> bool:
        return bool((batch.table.temperature[batch.rows] > 0).any())

    def apply(self, logits: Array, batch: SamplingBatch) -> Array:
        xp = namespace(logits)
        temperature = xp.asarray(batch.table.temperature[batch.rows])[:, None]
        # the best logit becomes exactly 0, so that the smallest temperature overflows to -inf and never to NaN
        shifted = logits - xp.max(logits, axis=-1, keepdims=True)
        return xp.where(temperature > 0, shifted / xp.where(temperature > 0, temperature, 1.0), logits)


class Truncation:
    """top_k, then top_p over what is left, then min_p: everything under a row's threshold becomes impossible.

    Thresholds keep ties: tokens as likely as the last one kept are kept too.
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
                ordered = xp.flip(xp.sort(values))
                if 0 < top_k < values.shape[0]:
                    ordered = ordered[:top_k]
                if top_p < 1:
                    weights = xp.exp(ordered - ordered[0])
                    # the smallest prefix whose share reaches p: as many as have less than p before them
                    before = xp.cumulative_sum(weights) - weights
                    kept = int(xp.count_nonzero(before < top_p * xp.sum(weights)))
                    ordered = ordered[: max(1, kept)]
                values = xp.where(values < ordered[-1], -xp.inf, values)
            min_p = float(batch.table.min_p[row])
            if min_p > 0:
                least = xp.log(xp.asarray(min_p, dtype=values.dtype)) + xp.max(values)
                values = xp.where(values < least, -xp.inf, values)
            logits[index] = values
        return logits


def default_stages() -> list[LogitsStage]:
    """The stages in their order."""
    return [MinTokens(), Temperature(), Truncation()]
