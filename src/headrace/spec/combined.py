"""Several proposers as one: each row takes the drafts of the first that has any, or, where drafts are trees, the best
of all of them in one tree; one that fails is left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.core.plan import Admit, DraftPass
from headrace.ops.xp import Array
from headrace.spec.base import DraftContext, Drafts, Proposer
from headrace.spec.tree import TokenTree, packed

_log = logging.getLogger(__name__)
_SKIPPED = 32  # steps after which a look-up is shown new tokens, though nobody wants its drafts
_CHAIN = 0.7  # what a draft that says nothing of itself is believed to be worth, given the one before it


class CombinedProposer:
    """A `Proposer` (spec/base.py) of others, which are asked in their order. What one raises never reaches the engine:
    drafts are guesses, and a text without them is the same."""

    def __init__(self, proposers: Sequence[tuple[str, Proposer]]):
        """Pairs of a name and a proposer."""
        self.names = tuple(name for name, _ in proposers)
        self._proposers: dict[int, Proposer] = dict(enumerate(proposer for _, proposer in proposers))
        self._dropped: list[str] = []  # since the last step was told of them
        self._skipped = 0
        self.follower = -1  # which sent its passes behind a step last
        self._asked: list[int] = []  # networks, for drafts, by the last call of `propose`
        self._no_seconds = (0.0,) * len(self.names)
        self.seconds: tuple[float, ...] = ()  # that each proposer took in the last call of `propose`

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes that a pass reads of each proposer that runs a network."""
        found = {self.names[source]: getattr(each, "weight_bytes", None) for source, each in self._proposers.items()}
        return {name: size for name, size in found.items() if size is not None}

    @property
    def wants_features(self) -> bool:
        """Whether one continues the model's features."""
        return any(getattr(proposer, "wants_features", False) for proposer in self._proposers.values())

    def admit(self, admits: Sequence[Admit]) -> None:
        if admits:
            for source, proposer in list(self._proposers.items()):
                self._try(source, proposer.admit, admits)

    def release(self, rows: Sequence[int]) -> None:
        if rows:
            for source, proposer in list(self._proposers.items()):
                self._try(source, proposer.release, rows)

    def propose(self, context: DraftContext) -> Drafts | None:
        if context.wanted is not None and not len(context.wanted):
            self.rest(context)
            return None
        own = np.array(context.limits, np.int64)
        found: list[tuple[int, Drafts]] = []
        having = np.zeros(len(own), bool)
        seconds = [0.0] * len(self.names)
        self._skipped += 1
        self._asked = []
        for source, proposer in list(self._proposers.items()):
            limits = own if context.wanted is None else np.minimum(own, context.wanted[source])
            started = time.perf_counter()
            if _is_network(proposer):
                if not (limits * ~having).any():
                    self._watch(source, context)
                    seconds[source] = time.perf_counter() - started
                    continue
                self._asked.append(source)
            elif not limits.any() and self._skipped % _SKIPPED:
                continue
            shown = context
            if found or context.wanted is not None:
                # a row that has drafts is shown all the same, with a limit of 0: a look-up learns from its tokens
                shown = replace(context, limits=(limits * ~having).tolist())
            drafts = self._try(source, proposer.propose, shown)
            seconds[source] = time.perf_counter() - started
            if drafts is not None:
                if not context.nodes:
                    having |= drafts.tokens[:, 0] >= 0
                found.append((source, drafts))
        self.seconds = tuple(seconds)
        return _one_tree(found, len(own), context.nodes) if context.nodes else _merged(found, len(own))

    def rest(self, context: DraftContext) -> None:
        """In place of `propose` after a step when nobody is asked for drafts: networks take in features, and look-ups,
        every so often, what is new. Of the context only rows, tokens and features are read."""
        self._asked = []
        self._skipped += 1
        self.seconds = self._no_seconds
        if not self._skipped % _SKIPPED:
            seconds = [0.0] * len(self.names)
            shown = replace(context, limits=[0] * len(context.rows))
            for source, proposer in list(self._proposers.items()):
                if not _is_network(proposer):
                    started = time.perf_counter()
                    self._try(source, proposer.propose, shown)
                    seconds[source] = time.perf_counter() - started
            self.seconds = tuple(seconds)
        self.watch(context)

    # -- drafts that a network makes on the GPU behind a step whose tokens nobody has seen (worker/device_chain.py)

    @property
    def follows(self) -> bool:
        """Whether there is one that may."""
        return any(getattr(proposer, "follows", False) for proposer in self._proposers.values())

    def continues(self, source: Any) -> None:
        """Where the model leaves what networks continue."""
        for proposer in self._proposers.values():
            getattr(proposer, "continues", lambda source: None)(source)

    def follow(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        limits: np.ndarray,
        wanted: np.ndarray | None,
        num_runs: int = 1,
    ) -> bool:
        """A step of spans [S] that verify all but their first token has been sent, after which rows may have `limits`
        [S] drafts, by each proposer `wanted` [P, S]: where one alone is asked, it may send at once what makes them, for
        `propose` to take. Whether it did. With `num_runs` the step is to run so many times, and `again` to follow each
        further one; then nothing is sent if that cannot be."""
        asked = [source for source in self._proposers if wanted is None or wanted[source].any()]
        if len(asked) == 1 and (call := getattr(self._proposers[asked[0]], "follow", None)) is not None:
            most = limits if wanted is None else np.minimum(limits, wanted[asked[0]])
            sent = self._try(asked[0], lambda spans: call(*spans, most, num_runs), (rows, starts, lengths))
            self.follower = asked[0]
            return bool(sent)
        return False

    def again(self) -> bool:
        """Send once more what followed last, behind the same step run again. Whether it was."""
        proposer: Any = self._proposers.get(self.follower)
        return proposer is not None and bool(self._try(self.follower, lambda call: call() or True, proposer.again))

    def passes(self) -> tuple[DraftPass, ...]:
        """What networks took in the last call of `propose`."""
        asked = [self._proposers[source] for source in self._asked if source in self._proposers]
        return tuple(each for proposer in asked for each in getattr(proposer, "last_passes", ()))

    def watch(self, context: DraftContext) -> None:
        """What the model made of a step after which nobody is asked for drafts."""
        for source in list(self._proposers):
            self._watch(source, context)

    def _watch(self, source: int, context: DraftContext) -> None:
        if (watch := getattr(self._proposers[source], "watch", None)) is not None:
            self._try(source, watch, context)

    @property
    def num_captures(self) -> int:
        """Graphs that networks on a GPU have made of their passes."""
        return sum(getattr(proposer, "num_captures", 0) for proposer in self._proposers.values())

    @property
    def step_kernel(self) -> Any:
        """What became of a kernel for passes of a network on a GPU (worker/step_kernel.py); None: there is none."""
        return next(filter(None, (getattr(each, "step_kernel", None) for each in self._proposers.values())), None)

    def idle(self) -> bool:
        """No step is in flight: take what was compiled meanwhile for networks on a GPU. Whether there was something."""
        return any([getattr(proposer, "idle", lambda: False)() for proposer in self._proposers.values()])

    def close(self) -> None:
        """Let go of what networks hold on a GPU."""
        for proposer in self._proposers.values():
            getattr(proposer, "close", lambda: None)()

    def dropped(self) -> tuple[str, ...]:
        """Names of those that failed since this was asked last."""
        names, self._dropped = self._dropped, []
        return tuple(names)

    def _try(self, source: int, call: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return call(argument)
        except Exception as error:
            name = self.names[source]
            _log.error(
                "headrace: the proposer %s failed (%s) and drafts no more; requests go on without it", name, error
            )
            del self._proposers[source]
            self._dropped.append(name)
            return None


def _is_network(proposer: Proposer) -> bool:
    return hasattr(proposer, "last_passes")


def _merged(found: Sequence[tuple[int, Drafts]], num_rows: int) -> Drafts | None:
    """One table of the drafts of several, whose rows do not overlap."""
    if not found:
        return None
    if len(found) == 1:
        ((source, drafts),) = found
        return replace(drafts, sources=np.full(num_rows, source, np.int32)) if source else drafts
    width = max(drafts.tokens.shape[1] for _, drafts in found)
    tokens = np.full((num_rows, width), -1, np.int32)
    sources = np.zeros(num_rows, np.int32)
    probs: list[Array | None] = [None] * num_rows
    for source, drafts in found:
        rows = drafts.tokens[:, 0] >= 0
        tokens[rows, : drafts.tokens.shape[1]] = drafts.tokens[rows]
        sources[rows] = source
        for row in rows.nonzero()[0].tolist() if drafts.probs is not None else ():
            probs[row] = drafts.probs[row]  # type: ignore[index]
    return Drafts(tokens, probs if any(drafts.probs is not None for _, drafts in found) else None, sources=sources)


def _one_tree(found: Sequence[tuple[int, Drafts]], num_rows: int, most: int) -> Drafts | None:
    """The best `most` nodes of each row's drafts; the row's source is the proposer that promises most."""
    trees = [TokenTree() for _ in range(num_rows)]
    promised = np.zeros((max((source for source, _ in found), default=0) + 1, num_rows), np.float64)
    for source, drafts in found:
        for row, tree in enumerate(trees):
            tokens = [token for token in drafts.tokens[row].tolist() if token >= 0]
            count = len(tokens)
            parents = list(range(-1, count - 1)) if drafts.tree is None else drafts.tree[row, :count].tolist()
            chain = [_CHAIN ** (place + 1) for place in range(count)]
            values = chain if drafts.values is None else drafts.values[row, :count].tolist()
            tree.merge(tokens, parents, values)
            promised[source, row] = sum(values)
    merged = packed(trees, most)
    return None if merged is None else replace(merged, sources=promised.argmax(axis=0).astype(np.int32))
