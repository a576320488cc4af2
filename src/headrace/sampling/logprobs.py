"""Log-probabilities: the log-softmax of the model's own logits, before any logits stage, greedy or not.

So they say what the model holds to be likely, not what the options made of it: they do not depend on temperature or
truncation, a banned token can be among the best, and the chosen token is there whatever its rank. Values are finite:
tokens that the model itself makes impossible (-inf, as for padding of the vocabulary) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headrace.core.plan import Logprob, TokenLogprobs
from headrace.ops.xp import Array, namespace

SLICE = 32  # positions of a prompt whose logits exist at once
_LEAST = float(np.finfo(np.float32).min)  # a prompt may hold a token that its model finds impossible


def token_logprobs(logits: Array, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """For each of N rows of logits float32 [N, V]: tokens[i] and the counts[i] most likely tokens, best first.

    A row that is not finite (NaN, or nothing possible) gives {}.
    """
    return [_of_row(logits[index], *each) for index, each in enumerate(zip(tokens, counts, strict=True))]


def by_span(spans: np.ndarray, entries: Sequence[TokenLogprobs]) -> dict[int, list[TokenLogprobs]]:
    """Entries gathered by the span [N] that each belongs to, in their order."""
    found: dict[int, list[TokenLogprobs]] = {}
    for span, entry in zip(spans.tolist(), entries, strict=True):
        found.setdefault(span, []).append(entry)
    return found


def best_continuations(logits: Array, count: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens of logits [V] that are possible at all, with their log-probabilities."""
    return [(token, entry.logprob) for token, entry in _of_row(logits, -1, count).items()]


def _of_row(logits: Array, token: int, count: int) -> TokenLogprobs:
    xp = namespace(logits)
    peak = float(xp.max(logits))
    if not math.isfinite(peak):
        return {}
    spread = math.log(float(xp.sum(xp.exp(logits - peak))))  # at least 0, so that no logprob is above 0
    found: TokenLogprobs = {}
    for rank, best in enumerate(_top(logits, count), start=1):
        value = float(logits[best])
        if value == -math.inf:
            break
        found[best] = Logprob(value - peak - spread, rank)
    if token >= 0 and token not in found:
        own = logits[token]
        rank = 1 + int(xp.count_nonzero(logits > own)) + int(xp.count_nonzero(logits[:token] == own))
        found[token] = Logprob(max(_LEAST, float(own) - peak - spread), rank)
    return found


def _top(logits: Array, count: int) -> list[int]:
    """Ids of the `count` highest of logits [V], best first; of equals the lower id first."""
    xp, size = namespace(logits), logits.shape[0]
    count = min(count, size)
    if not count:
        return []
    ordered = np.partition(logits, size - count) if xp is np else xp.sort(logits)
    ids = xp.nonzero(logits >= ordered[size - count])[0]
    pairs = zip((-logits[ids]).tolist(), ids.tolist(), strict=True)
    return [token for _, token in sorted(pairs)[:count]]
