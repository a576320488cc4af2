"""Token trees of a step on a GPU: what goes over of them, and what the host works out from the tokens that were drawn.

The GPU walks along its trees itself (ops/triton/trees.py). The host needs the same paths: for rows that it draws for,
and since what the model made of accepted drafts is to stand in the order of a chain, for heads that continue it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.attention.tree_masks import ancestor_masks
from headrace.core.plan import StepPlan
from headrace.ops.triton.trees import TreeSpans
from headrace.sampling.state import TreeRows


@dataclass(frozen=True)
class StepTrees:
    """The trees of a plan."""

    parents: np.ndarray  # int32 [T]  as StepBatch has them
    query_start: np.ndarray  # int32 [S + 1]
    tokens: np.ndarray  # int32 [T]  the drafted token of each node

    @classmethod
    def of(cls, plan: StepPlan, parents: np.ndarray, token_ids: np.ndarray, num_tokens: np.ndarray) -> StepTrees:
        """`parents` as RequestTable.tree_parents made them, of the table's tokens [max rows, max length] and numbers of
        known ones [max rows]."""
        starts = query_starts(plan)
        tokens = np.full(len(parents), -1, np.int32)
        for span in np.flatnonzero(plan.num_drafts).tolist():
            row, end, count = int(plan.rows[span]), int(starts[span + 1]), int(plan.num_drafts[span])
            known = int(num_tokens[row])
            tokens[end - count : end] = token_ids[row, known : known + count]
        return cls(parents, starts, tokens)

    def path(self, span: int, drawn: list[int]) -> list[int]:
        """The places in its span of the drafts of a tree that are accepted where a span's tokens are `drawn`."""
        start, end = int(self.query_start[span]), int(self.query_start[span + 1])
        parents, tokens = self.parents[start:end].tolist(), self.tokens[start:end].tolist()
        found, at = [], 0
        for token in drawn[:-1]:
            at = next(node for node in range(at + 1, end - start) if parents[node] == at and tokens[node] == token)
            found.append(at)
        return found

    def paths(self, drawn: list[list[int]]) -> dict[int, list[int]]:
        """`path` of each span that is a tree."""
        spans = np.searchsorted(self.query_start, np.flatnonzero(self.parents == -1), side="right") - 1
        return {span: self.path(span, drawn[span]) for span in spans.tolist()}

    def order(self, paths: dict[int, list[int]]) -> np.ndarray | None:
        """See keep_paths (worker/trees.py)."""
        order = np.arange(len(self.parents))
        for span, path in paths.items():
            first = int(self.query_start[span])
            order[first + 1 : first + 1 + len(path)] = first + np.array(path, np.int64)
        return None if (order == np.arange(len(order))).all() else order

    def rows(self, lines: np.ndarray) -> tuple[TreeRows | None, np.ndarray]:
        """(how the logits of the tokens `lines` [L] hang together, the depth of each in its tree int32 [L]); all tokens
        of a tree, in order, or none of them."""
        parents = self.parents[lines].copy()
        depths = np.zeros(len(lines), np.int32)
        first = 0
        for line, parent in enumerate(parents.tolist()):
            if parent == -1:
                first = line
            elif parent >= 0:
                parents[line] = first + parent
                depths[line] = depths[first + parent] + 1
        return (TreeRows(parents, self.tokens[lines]) if (parents > -2).any() else None), depths


def query_starts(plan: StepPlan) -> np.ndarray:
    """int32 [S + 1]: span s is tokens query_start[s] : query_start[s + 1]."""
    starts = np.zeros(plan.num_spans + 1, np.int32)
    np.cumsum(plan.lengths, out=starts[1:])
    return starts


class TreeBuffers:
    """Memory on the GPU for what it is told of trees, in steps of up to `max_tokens` tokens, at fixed addresses."""

    def __init__(self, max_tokens: int, ring: int, device: torch.device):
        """`ring`: more than there can be steps in flight."""
        self._size = max_tokens + max_tokens % 2  # masks are of 64 bits
        pinned = device.type == "cuda"
        words = 4 * self._size
        self._pinned = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(ring)]
        self._inbox = torch.zeros(words, dtype=torch.int32, device=device)
        self._turn = 0

    def spans(self, num_tokens: int) -> TreeSpans:
        """The buffers of a step of so many tokens, padding included."""
        size = self._size
        return TreeSpans(
            self._inbox[: 2 * size].view(torch.int64)[:num_tokens],
            self._inbox[2 * size :][:num_tokens],
            self._inbox[3 * size :][:num_tokens],
        )

    def clear(self) -> None:
        """Make all following steps ones of chains, until `send`."""
        self._inbox.zero_()

    def send(self, trees: StepTrees) -> None:
        """Bring a step's trees over."""
        masks, depths = ancestor_masks(trees.parents, trees.query_start)
        count, size = len(masks), self._size
        place = np.arange(count, dtype=np.int32) - np.repeat(trees.query_start[:-1], np.diff(trees.query_start))
        self._turn = (self._turn + 1) % len(self._pinned)
        words = self._pinned[self._turn].numpy()
        words[:] = 0
        words[: 2 * count] = masks.view(np.int32)
        words[2 * size : 2 * size + count] = depths - place
        words[3 * size : 3 * size + count] = np.where(trees.parents == -2, place - 1, trees.parents)
        self._inbox.copy_(self._pinned[self._turn], non_blocking=True)
