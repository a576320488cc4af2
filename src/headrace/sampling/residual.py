"""Two other judges of drafts: textbook rejection sampling, and a coin for benchmarks.

p is the distribution of the model that verifies, after every logits stage; q that which the draft was drawn from. (Some
texts have the letters the other way round.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace import ops
from headrace.ops.noise import philox
from headrace.ops.xp import Array
from headrace.sampling.sampler import Sampler
from headrace.sampling.state import SamplingBatch, TreeRows

DRAFT_STREAM = 1  # noise that drafts are drawn with here: not that of the tokens which take their place
_COIN = 1  # the last word of a counter; that of token noise is 0
_MASK = 0xFFFFFFFF


def coins(batch: SamplingBatch, index: np.ndarray, turn: np.ndarray | int = 0) -> np.ndarray:
    """Uniform numbers in (0, 1), float64 [N], of (seed, choice, position, turn) at places `index` of the batch; `turn`
    counts those of one position."""
    rows = batch.rows[index]
    seeds, choices = batch.table.seed[rows], batch.table.choice[rows]
    turns = np.zeros_like(seeds) + turn
    counter = (turns, batch.positions[index].astype(np.int64), choices, np.full_like(seeds, _COIN))
    word = philox(counter, (seeds & _MASK, (seeds >> 32) & _MASK))[0]
    return (word.astype(np.float64) + 0.5) / 2.0**32


class ResidualSampler(Sampler):
    """Rejection sampling (Leviathan et al. 2023, appendix A.1; Chen et al. 2023, algorithm 2): draft x is accepted with
    probability min(1, p(x) / q(x)); where it is not, the token is drawn from norm(max(0, p - q)), and the rest of the
    draft is dropped. After a draft that was accepted whole comes one more token, from p.

    Texts have the distribution that they have without drafts, but they are not the same texts. A draft of a look-up is
    certain (q is 1 there); of greedy rows p is.

    In a tree the children of a node are candidates for one position (`accept_among`), the likeliest first, and the walk
    goes on below the one that is accepted. Which nodes a tree has depends on their values, hence on their tokens; what
    was kept of draws by such a rule is no draw any more. So nodes are certain here, whoever offers them: then the
    result has the distribution p for every tree that was made without knowing the coins.
    """

    def judge(
        self,
        chosen: np.ndarray,
        drawn: np.ndarray,
        staged: Array,
        batch: SamplingBatch,
        spans: np.ndarray,
        drafts: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens, agreed = chosen.copy(), (drafts >= 0) & (drafts == chosen)
        tested = np.flatnonzero((drafts >= 0) & drawn & (batch.table.temperature[batch.rows] > 0))
        broken = -1  # the span whose draft was refused last: what follows in it does not matter
        for index, coin in zip(tested.tolist(), coins(batch, tested).tolist(), strict=True):
            if spans[index] == broken:
                continue
            draft = int(drafts[index])
            probs = distribution(np.asarray(staged[index], np.float64))
            drafted = _drafted(batch, index)
            agreed[index] = coin * (1.0 if drafted is None else drafted[draft]) < probs[draft]
            if agreed[index]:
                tokens[index] = draft
                continue
            broken = int(spans[index])
            if drafted is None:
                probs[draft] = 0.0
            else:
                np.maximum(probs - drafted, 0.0, out=probs)
            if probs.any():  # else rounding has refused what is as likely as it was drawn: the plain draw will do
                tokens[index] = _draw(probs, batch, index)
        if batch.trees is not None:
            _walk_trees(batch.trees, tokens, drawn, staged, batch)
        return tokens, agreed


def _walk_trees(trees: TreeRows, tokens: np.ndarray, drawn: np.ndarray, staged: Array, batch: SamplingBatch) -> None:
    """Judge the trees of rows that are not greedy, from their first rows down along what is accepted: writes the token
    behind each row on the way into `tokens` [L]. Rows beside the way keep theirs, which nobody will read."""
    below: dict[int, list[int]] = {}
    turns: list[int] = []  # of the coins of children, as they come
    children = np.flatnonzero(trees.parents >= 0)
    for child, parent in zip(children.tolist(), trees.parents[children].tolist(), strict=True):
        turns.append(len(below.setdefault(parent, [])))
        below[parent].append(child)
    parents = np.array(list(below), np.int64)
    chances = dict(
        zip(children.tolist(), coins(batch, trees.parents[children], np.array(turns, np.int64)).tolist(), strict=True)
    )
    counts = np.array([len(each) for each in below.values()], np.int64)
    uniforms = dict(zip(below, coins(batch, parents, counts).tolist(), strict=True))
    warm = batch.table.temperature[batch.rows] > 0
    for first in np.flatnonzero((trees.parents == -1) & warm).tolist():
        at: int | None = first
        while at is not None and drawn[at] and at in below:
            probs = distribution(np.asarray(staged[at], np.float64))
            candidates = [int(trees.tokens[child]) for child in below[at]]
            own = [chances[child] for child in below[at]]
            accepted, tokens[at] = accept_among(probs, candidates, None, own, uniforms[at])
            at = below[at][accepted] if accepted >= 0 else None


class SyntheticSampler(Sampler):
    """Accepts each draft with a given probability, whatever it is. For benchmarks: time is spent as with drafts of that
    quality, but the text is nobody's."""

    def __init__(self, acceptance: float, sampler: Sampler):
        super().__init__(sampler.stages)
        self._acceptance = acceptance

    def judge(
        self,
        chosen: np.ndarray,
        drawn: np.ndarray,
        staged: Array,
        batch: SamplingBatch,
        spans: np.ndarray,
        drafts: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        return chosen, (drafts >= 0) & (coins(batch, np.arange(len(chosen))) < self._acceptance)


def distribution(logits: np.ndarray) -> np.ndarray:
    """Probabilities [V] of logits [V]; float32 in, float32 out."""
    probs: np.ndarray = np.exp(logits - logits.max())
    return probs / probs.sum()


def _drafted(batch: SamplingBatch, index: int) -> np.ndarray | None:
    """What the draft of this place was drawn from, float64 [V]; None if it was certain."""
    row = int(batch.rows[index])
    probs = batch.table.draft_probs[row]
    if probs is None:
        return None
    return np.asarray(probs[int(batch.positions[index]) - int(batch.table.draft_start[row])], np.float64)


def _draw(probs: np.ndarray, batch: SamplingBatch, index: int) -> int:
    """A token of an unnormalised distribution [V], with the noise of its position."""
    row = batch.rows[index : index + 1]
    noise = ops.gumbel_noise(
        np.arange(len(probs), dtype=np.int64),
        batch.positions[index : index + 1].astype(np.int64),
        batch.table.seed[row],
        batch.table.choice[row],
    )
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(probs) + np.asarray(noise)[0]))


def accept_among(
    probs: np.ndarray, candidates: Sequence[int], drafted: np.ndarray | None, coins: Sequence[float], uniform: float
) -> tuple[int, int]:
    """(index of the candidate that is accepted, or -1; token) of several candidates for one position, so that the token
    has the distribution `probs` float64 [V] whatever they are.

    They are tried one after the other, each as a single draft would be: accepted with probability min(1, p(x) / q(x)),
    else p becomes norm(max(0, p - q)); p is what is left of `probs` by then, never `probs` itself (recursive rejection
    sampling: SpecInfer, Miao et al. 2023, section 4.3). `drafted` float64 [V] is the q
    that candidates were drawn from one after the other without putting them back (Yang et al. 2024, section 3): after
    one was refused, q is without it. None: they were chosen, not drawn, and q is 1 at each; then none may come twice.
    `coins` are uniform numbers in (0, 1), one a candidate, `uniform` is one more, for the token where none is accepted.
    Raises ValueError where a candidate could not have been drawn.
    """
    left = np.array(probs, np.float64)
    left /= left.sum()
    q = None if drafted is None else np.array(drafted, np.float64)
    for index, (token, coin) in enumerate(zip(candidates, coins, strict=True)):
        if q is None:
            chance, rest = left[token], left.copy()
            rest[token] = 0.0
        else:
            if not q[token] > 0:
                raise ValueError(
                    f"candidate {index}, token {token}, is drawn from a distribution that does not hold it"
                )
            q /= q.sum()
            chance, rest = left[token] / q[token], np.maximum(left - q, 0.0)
            q[token] = 0.0
        if coin < chance:
            return index, token
        if not rest.any():  # rounding has refused what is certain
            return index, token
        left = rest / rest.sum()
    return -1, int(min(np.searchsorted(np.cumsum(left), uniform, side="right"), np.flatnonzero(left)[-1]))
