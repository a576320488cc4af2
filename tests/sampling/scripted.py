"""Scripted logits: a batch of rows with settings, histories and drafts, and a slow reference of one row's stages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace.core.plan import Admit
from headrace.sampling.params import BadWords, SamplingParams
from headrace.sampling.sampler import Sampled, Sampler
from headrace.sampling.state import SamplingBatch, SamplingTable

MAX_LEN = 64


@dataclass
class Row:
    """One request at a step: `logits` float32 [1 + len(drafts), V] are those of its next token and after each draft."""

    logits: np.ndarray
    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    seed: int = 0
    choice: int = 0
    stop_ids: frozenset[int] = frozenset()
    bad_words: BadWords | None = None

    def __post_init__(self):
        self.logits = np.atleast_2d(np.asarray(self.logits, np.float32))
        assert len(self.logits) == 1 + len(self.drafts)

    @property
    def history(self) -> list[int]:
        return self.prompt + self.output


class Spy:
    """A last stage that keeps what the others made of the logits."""

    def active(self, batch):
        return True

    def apply(self, logits, batch):
        self.seen = np.asarray(logits)
        return logits


def sample(rows: list[Row], wrap=lambda array: array, stages=None) -> Sampled:
    """One step of `rows`, in this order, in shuffled rows of the table; `wrap` makes the logits another library's."""
    table = SamplingTable(len(rows) + 3)
    tokens = np.full((len(rows) + 3, MAX_LEN), -1, np.int32)
    places, spans, positions, drafts, logits = [], [], [], [], []
    for span, row in enumerate(rows):
        place = (span * 5 + 2) % (len(rows) + 3) if (len(rows) + 3) % 5 else span
        history = row.history
        table.set(
            Admit(
                place,
                str(span),
                history,
                len(row.prompt),
                0,
                row.params,
                row.seed,
                row.choice,
                row.stop_ids,
                row.bad_words,
            )
        )
        full = history + row.drafts
        tokens[place, : len(full)] = full
        for step in range(1 + len(row.drafts)):
            places.append(place)
            spans.append(span)
            positions.append(len(history) + step)
            drafts.append(row.drafts[step] if step < len(row.drafts) else -1)
            logits.append(row.logits[step])
    batch = SamplingBatch(table, np.array(places, np.int32), np.array(positions, np.int32), tokens)
    return Sampler(stages).sample(
        wrap(np.array(logits)), batch, np.array(spans, np.int32), len(rows), np.array(drafts, np.int32)
    )


def drawn(rows: list[Row], **kwargs) -> list[list[int]]:
    """Tokens of each span."""
    result = sample(rows, **kwargs)
    return [tokens[:count] for tokens, count in zip(result.tokens.tolist(), result.counts.tolist(), strict=True)]


def reference_scores(row: Row, step: int = 0) -> np.ndarray:
    """What every stage but the draw makes of a row's logits, token by token, in float64: unnormalised log-weights."""
    params, output = row.params, row.output + row.drafts[:step]
    scores = [float(x) for x in row.logits[step]]
    for token in range(len(scores)):
        early = len(output) < params.min_tokens and token in row.stop_ids
        barred = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        if early or barred or (row.bad_words is not None and token in row.bad_words.banned(output)):
            scores[token] = -np.inf
            continue
        if token in row.prompt + output:
            ratio = float(np.float32(params.repetition_penalty))
            scores[token] = scores[token] / ratio if scores[token] > 0 else scores[token] * ratio
        if token in output:
            scores[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
        scores[token] += dict(params.logit_bias).get(token, 0.0)
    if params.temperature == 0:
        return np.array(scores)
    return truncated(np.array(scores) / max(params.temperature, 1e-20), params)


def truncated(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """top_k, top_p and min_p by their definitions: a token stays unless enough better ones come before it."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if not np.isfinite(scores.max()):
            return scores
        weights = np.exp(scores - scores.max())
    order = sorted(range(len(scores)), key=lambda token: -weights[token])
    if 0 < params.top_k < len(order):
        order = [token for token in order if weights[token] >= weights[order[params.top_k - 1]]]
    if params.top_p < 1:
        total, before = sum(weights[token] for token in order), 0.0
        for token in list(order):
            if before >= params.top_p * total and before > 0:
                last = weights[order[order.index(token) - 1]]
                order = [other for other in order if weights[other] >= last]
                break
            before += weights[token]
    kept = [token for token in order if weights[token] >= params.min_p]
    result = np.full(len(scores), -np.inf)
    result[kept] = scores[kept]
    return result
