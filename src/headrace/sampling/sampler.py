"""The sampler, which is also the verifier.

The token at a position is always argmax(logits after every stage + Gumbel noise of (seed, choice, position)); greedy
rows have no noise. A draft is accepted when it equals that token. So a request's text depends on its own key and logits
alone: batching, chunking, preemption and speculation cannot change it. Sampling without drafts is verification with
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace import ops
from headrace.ops.xp import Array, namespace
from headrace.sampling.stages import LogitsStage, default_stages
from headrace.sampling.state import SamplingBatch


@dataclass(frozen=True)
class Sampled:
    """What came out for R spans; K is the longest draft."""

    tokens: np.ndarray  # int32 [R, K+1]; -1 pads
    counts: np.ndarray  # int32 [R]  tokens of each span: 0 if it yields none, else accepted drafts + 1
    errors: dict[int, str]  # span -> why no token could be drawn


class Sampler:
    """Draws tokens and judges drafts."""

    def __init__(self, stages: Sequence[LogitsStage] | None = None):
        self.stages = list(stages) if stages is not None else default_stages()

    def draw(self, logits: Array, batch: SamplingBatch) -> tuple[Array, Array]:
        """(token int64 [L], whether its logit is finite bool [L]) for logits float32 [L, V], which are used up."""
        xp = namespace(logits)
        for stage in self.stages:
            if stage.active(batch):
                logits = stage.apply(logits, batch)
        chosen = xp.argmax(logits, axis=-1)
        warm = (batch.table.temperature[batch.rows] > 0).nonzero()[0]
        if warm.shape[0]:
            rows = batch.rows[warm]
            ids = xp.arange(logits.shape[1], dtype=xp.int64)
            noise = ops.gumbel_noise(
                ids,
                xp.asarray(batch.positions[warm], dtype=xp.int64),
                xp.asarray(batch.table.seed[rows]),
                xp.asarray(batch.table.choice[rows]),
            )
            chosen[warm] = xp.argmax(logits[warm] + noise, axis=-1)
        best = xp.take_along_axis(logits, chosen[:, None], axis=-1)[:, 0]
        return chosen, xp.isfinite(best)

    def sample(
        self, logits: Array, batch: SamplingBatch, spans: np.ndarray, num_spans: int, drafts: np.ndarray
    ) -> Sampled:
        """Tokens of each span. `spans` int32 [L] names the span of each row of logits (ascending, a span's rows in
        order of position); `drafts` int32 [L] is the draft that follows each position, -1 for none."""
        if not logits.shape[0]:
            return Sampled(np.full((num_spans, 1), -1, np.int32), np.zeros(num_spans, np.int32), {})
        chosen_dev, finite_dev = self.draw(logits, batch)
        chosen, finite = np.asarray(chosen_dev), np.asarray(finite_dev)
        errors = {
            int(spans[i]): "the model's logits are not finite here; the weights or the KV cache are damaged"
            for i in np.flatnonzero(~finite)
        }
        agreed = (drafts >= 0) & (drafts == chosen)
        width = 1 + int(np.max(np.bincount(spans[drafts >= 0], minlength=1)))
        tokens = np.full((num_spans, width), -1, np.int32)
        counts = np.zeros(num_spans, np.int32)
        if width == 1:
            tokens[spans, 0] = chosen
            counts[spans] = 1
            return Sampled(tokens, counts, errors)
        going = np.ones(num_spans, bool)
        for index, span in enumerate(spans.tolist()):
            if going[span]:
                tokens[span, counts[span]] = chosen[index]
                counts[span] += 1
                going[span] = agreed[index]
        return Sampled(tokens, counts, errors)
