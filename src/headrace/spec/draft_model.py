"""A second, smaller model drafts (Leviathan et al. 2023; Chen et al. 2023).

Its tokens pass the same logits stages as the model's own and are drawn with the same noise of (seed, choice, position):
where the two distributions are close the two draws are the same token, so drafts are accepted under sampling too. For
residual verification (sampling/residual.py) they are drawn with noise of their own, and their distributions kept; nodes
of trees are the likeliest tokens then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from headrace.core.plan import Admit, DraftPass
from headrace.ops.xp import Array
from headrace.sampling.residual import DRAFT_STREAM, distribution
from headrace.sampling.sampler import Sampler
from headrace.sampling.state import SamplingBatch
from headrace.spec.base import DraftContext, Drafts
from headrace.spec.draft_runner import DraftRunner
from headrace.spec.eagle import WIDTH, HeadRunner
from headrace.spec.state_heads import StateRunner
from headrace.spec.tree import ROOT, TokenTree, ladder_tree, packed, product_tree, static_tree

RANKS = 6  # candidates of a position that may become nodes of a tree


class _Growing:
    """One row's tree while a head drafts it, level by level."""

    def __init__(self) -> None:
        self.tree = TokenTree()
        self.paths: dict[int, tuple[int, ...]] = {ROOT: ()}  # tokens on the way to a node, its own included
        self.picked: list[int] = []  # nodes to be drafted on from
        self._places = {ROOT: 0}  # of nodes that the head has run
        self._level: list[int] = []  # nodes that nothing follows yet

    def branch(self, node: int, tokens: list[int], shares: list[float]) -> None:
        """Candidates behind a node."""
        value = 1.0 if node == ROOT else self.tree.values[node]
        for token, share in zip(tokens, shares, strict=True):
            if share > 0:
                child = self.tree.add(node, token, value * share)
                self.paths[child] = (*self.paths[node], token)
                self._level.append(child)

    def pick(self, most: int) -> bool:
        """Choose the best nodes of the last level that are among the `most` best of all; False if there are none."""
        values = self.tree.values
        least = sorted(values, reverse=True)[:most][-1] if values else 0.0
        level = sorted((node for node in self._level if values[node] >= least), key=lambda node: -values[node])
        self.picked, self._level = level[:WIDTH], []
        return bool(self.picked)

    def enter(self) -> list[tuple[int, int]]:
        """The chosen nodes as HeadRunner.grow takes them."""
        news = []
        for node in self.picked:
            news.append((self._places[self.tree.parents[node]], self.tree.tokens[node]))
            self._places[node] = len(self._places)
        return news


class DraftModelProposer:
    """A `Proposer` (spec/base.py) over a model that drafts, or over a head that continues the verifying model."""

    def __init__(
        self,
        runner: DraftRunner | HeadRunner | StateRunner,
        sampler: Sampler,
        num_tokens: int,
        vocab_size: int,
        residual: bool = False,
    ):
        """Drafts at most `num_tokens` at a time, of the `vocab_size` tokens of the model that verifies them; for
        `residual` verification or for that by the same noise."""
        if num_tokens < 1:
            raise ValueError(f"at least one token must be drafted, not {num_tokens}")
        self.runner = runner
        self._sampler = sampler
        self._num_tokens = num_tokens
        self._vocab_size = vocab_size
        self._residual = residual
        # of heads whose tree has a fixed shape: its paths
        self._paths: Sequence[Sequence[int]] = getattr(runner.model, "paths", ())
        self._ranks = max((rank + 1 for path in self._paths for rank in path), default=RANKS)
        self._vocabulary = runner.model.vocabulary if isinstance(runner, HeadRunner) else None
        self.wants_features = isinstance(runner, HeadRunner | StateRunner)

    @property
    def weight_bytes(self) -> int:
        """Bytes that a pass reads."""
        return self.runner.model.weight_bytes

    @property
    def last_passes(self) -> tuple[DraftPass, ...]:
        """Passes of the last call of `propose`, with their seconds."""
        return tuple(self.runner.passes)

    def admit(self, admits: Sequence[Admit]) -> None:
        self.runner.admit(admits)

    def release(self, rows: Sequence[int]) -> None:
        self.runner.release(rows)

    def watch(self, context: DraftContext) -> None:
        """See CombinedProposer."""
        if isinstance(self.runner, HeadRunner | StateRunner) and context.features is not None:
            self.runner.watch(context.features, context.num_tokens)

    def propose(self, context: DraftContext) -> Drafts | None:
        chosen, depths = self.runner.begin(context, self._num_tokens)
        if not len(chosen):
            return None
        if context.nodes and isinstance(self.runner, HeadRunner):
            return self._grow(self.runner, chosen, depths, context)
        rows = context.rows[chosen]
        known = context.num_tokens[rows]
        shallow, deep = int(depths.min()), int(depths.max())
        drafts = np.full((len(rows), deep), -1, np.int32)
        probs: list[list[Array]] = [[] for _ in rows]
        ranked: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in rows]  # of each position: candidates, shares
        going = np.arange(len(rows))  # indices of the rows that still draft
        assert context.sampling is not None
        # the best token is all that matters of most rows
        plain = not context.nodes and not self._residual and bool(context.sampling.plain[rows].all())
        for column in range(deep):
            if column >= shallow:
                going = going[depths[going] > column]
            if not len(going):
                break
            at, positions = (rows, known) if len(going) == len(rows) else (rows[going], known[going])
            positions = positions + column
            logits = self.runner.step(at, positions)
            started = time.perf_counter()
            if plain:
                tokens, scores = self._best(logits)
            else:
                tokens, scores, staged = self._draw(self._of_vocabulary(logits), context, at, positions)
            if self.runner.passes:  # drawing is a part of what a draft costs
                last = self.runner.passes[-1]
                self.runner.passes[-1] = last._replace(seconds=last.seconds + time.perf_counter() - started)
            drawn = np.isfinite(scores)  # else no token is allowed here: the draft ends before it
            if plain and drawn.all():
                drafts[going, column] = context.token_ids[at, positions] = tokens
                continue
            for place in drawn.nonzero()[0].tolist() if self._residual and not context.nodes else ():
                probs[going[place]].append(distribution(staged[place]))
            if context.nodes:
                best = self._candidates(staged, self._batch(context, at, positions))
                tokens = best[0][:, 0]
                for index in drawn.nonzero()[0].tolist():
                    ranked[going[index]].append((best[0][index], best[1][index]))
            going = going[drawn]
            drafts[going, column] = tokens[drawn]
            context.token_ids[rows[going], positions[drawn]] = tokens[drawn]  # what the next pass reads, and penalties
        self.runner.end(rows, drafts)
        if context.nodes:
            return self._trees(chosen, ranked, context)
        placed = drafts
        if len(chosen) < len(context.rows):
            placed = np.full((len(context.rows), drafts.shape[1]), -1, np.int32)
            placed[chosen] = drafts
        if not self._residual:
            return Drafts(placed)
        kept: list[Array | None] = [None] * len(context.rows)
        for place, each in zip(chosen.tolist(), probs, strict=True):
            kept[place] = np.stack(each) if each else None
        return Drafts(placed, kept)

    def _batch(
        self,
        context: DraftContext,
        rows: np.ndarray,
        positions: np.ndarray,
        paths: Sequence[Sequence[int]] | None = None,
    ) -> SamplingBatch:
        assert context.sampling is not None
        stream = DRAFT_STREAM if self._residual else 0
        return SamplingBatch(context.sampling, rows, positions, context.token_ids, stream, paths=paths)

    def _trees(
        self, chosen: np.ndarray, ranked: list[list[tuple[np.ndarray, np.ndarray]]], context: DraftContext
    ) -> Drafts | None:
        """Candidates of each position as trees: of heads that do not see each other's tokens all combinations; else the
        chain of the best, and beside each of its tokens the others of its position."""
        trees = [TokenTree() for _ in context.rows]
        independent = getattr(self.runner.model, "independent", False)
        for index, columns in zip(chosen.tolist(), ranked, strict=True):
            if columns and independent:
                tokens, shares = (np.stack(each) for each in zip(*columns, strict=True))
                paths = self._paths
                trees[index] = (
                    static_tree(tokens, shares, paths) if paths else product_tree(tokens, shares, context.nodes)
                )
                continue
            trees[index] = ladder_tree(columns)
        return packed(trees, context.nodes)

    def _grow(self, runner: HeadRunner, chosen: np.ndarray, depths: np.ndarray, context: DraftContext) -> Drafts | None:
        """Trees whose best nodes of each level are drafted on from (EAGLE-2, Li et al. 2024, section 4.1)."""
        rows = context.rows[chosen]
        known = context.num_tokens[rows]
        growing = [_Growing() for _ in rows]
        logits = runner.step(rows, known)
        fresh: list[tuple[int, int]] = [(index, ROOT) for index in range(len(rows))]  # (row, node) of the logits' rows
        for level in range(1, int(depths.max()) + 1):
            owners = np.array([index for index, _ in fresh])
            paths = [growing[index].paths[node] for index, node in fresh]
            batch = self._batch(context, rows[owners], known[owners] + level - 1, paths)
            _, scores, staged = self._sampler.draw(self._of_vocabulary(logits), batch)
            best = self._candidates(staged, batch)
            for place, (index, node) in enumerate(fresh):
                if np.isfinite(np.asarray(scores)[place]):
                    growing[index].branch(node, best[0][place].tolist(), best[1][place].tolist())
            going = [
                index for index in range(len(rows)) if depths[index] > level and growing[index].pick(context.nodes)
            ]
            if not going:
                break
            fresh = [(index, node) for index in going for node in growing[index].picked]
            logits = runner.grow(rows[going], [growing[index].enter() for index in going])
        runner.end(rows, np.zeros((len(rows), 0), np.int32))
        trees = [TokenTree() for _ in context.rows]
        for place, each in zip(chosen.tolist(), growing, strict=True):
            trees[place] = each.tree
        return packed(trees, context.nodes)

    def _candidates(self, staged: Array, batch: SamplingBatch) -> tuple[np.ndarray, np.ndarray]:
        """The best tokens of each row for nodes of a tree, and how likely each is to be accepted [R, ranks]. Residual
        verification accepts with the model's probability, the other one what its noise favours."""
        return self._sampler.likeliest(staged, batch, self._ranks, noise=not self._residual)

    def _draw(
        self, logits: Array, context: DraftContext, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Array]:
        """(tokens [R], their logits [R], all logits after the stages [R, V]) at the positions, from logits [R, V]."""
        chosen, scores, staged = self._sampler.draw(logits, self._batch(context, rows, positions))
        return np.asarray(chosen), np.asarray(scores), staged

    def _best(self, logits: Array) -> tuple[np.ndarray, np.ndarray]:
        """(tokens [R], their logits [R]): the best of what a runner's `step` returned."""
        known = logits[:, : self._vocab_size]
        best = known.argmax(axis=1)
        scores = known[np.arange(len(best)), best]
        ids = None if self._vocabulary is None else self._vocabulary.ids
        return best if ids is None else ids[best], scores

    def _of_vocabulary(self, logits: Array) -> Array:
        """Logits of as many tokens as the verifying model has: heads score some, checkpoints pad theirs differently."""
        if self._vocabulary is not None:
            logits = self._vocabulary.spread(logits)
        size = logits.shape[1]
        if size == self._vocab_size:
            return logits
        if size > self._vocab_size:
            return np.ascontiguousarray(logits[:, : self._vocab_size])
        padded = np.full((logits.shape[0], self._vocab_size), -np.inf, np.float32)
        padded[:, :size] = logits
        return padded
