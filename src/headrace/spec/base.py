"""Speculation: what a proposer is. Verification is the sampler's (sampling/sampler.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace.core.plan import Admit
from headrace.ops.xp import Array
from headrace.sampling.state import SamplingTable


@dataclass(frozen=True)
class Drafts:
    """Proposed tokens of R rows, to be verified in the next step."""

    tokens: np.ndarray  # int32 [R, K]; -1 pads
    probs: list[Array | None] | None = None  # of each row float32 [K, V], what its drafts were drawn from; None: they
    # are certain, or nobody will ask
    # int32 [R, K]: tokens are nodes of a tree, and this the index of each one's parent, -1: the row's last known token;
    # nodes come after their parents, the likeliest first, and no two children of a node are equal. None: chains
    tree: np.ndarray | None = None
    values: np.ndarray | None = None  # float32 [R, K]  how likely each node is believed to be accepted; of trees
    sources: np.ndarray | None = None  # int32 [R]  which of the engine's proposers; None: the only one
    placed: bool = False  # a GPU's request table has them already, behind the rows' known tokens


@dataclass(frozen=True)
class StepFeatures:
    """What the model made of the T tokens of a step's S spans."""

    rows: np.ndarray  # int32 [S]
    starts: np.ndarray  # int32 [S]  position of each span's first token
    query_start: np.ndarray  # int32 [S+1]  span s is tokens query_start[s] : query_start[s+1]
    num_computed: np.ndarray  # int32 [max rows]  tokens of each row that stand, refused drafts left out
    values: Array  # float32 [T, F]


@dataclass(frozen=True)
class DraftContext:
    """What a proposer may look at after a step has been sampled."""

    rows: np.ndarray  # int32 [R]  rows that may get drafts
    token_ids: np.ndarray  # int32 [max rows, max length]  the request table's tokens; what lies behind the known ones
    # of `rows` is the proposer's to write
    num_tokens: np.ndarray  # int32 [max rows]  known tokens
    limits: list[int]  # most drafts that each of `rows` may get; 0: none
    sampling: SamplingTable | None = None  # the rows' sampling settings, for drafts that are drawn
    wanted: np.ndarray | None = None  # int32 [P, R]  most drafts by each proposer, as the plan says; None: no bound
    features: StepFeatures | None = None  # of the step, if a proposer continues them
    nodes: int = 0  # most nodes of a row's tree, whose depth `limits` bounds; 0: chains only


class Proposer(Protocol):
    """Guesses tokens ahead."""

    def admit(self, admits: Sequence[Admit]) -> None:
        """The rows of `admits` hold these sequences from now on."""
        ...

    def release(self, rows: Sequence[int]) -> None:
        """The sequences of these rows have ended, or lost their place."""
        ...

    def propose(self, context: DraftContext) -> Drafts | None:
        """Drafts for the context's rows, or None for no drafts at all."""
        ...


def padded(found: Sequence[Sequence[int]]) -> Drafts | None:
    """Drafts of lists of tokens, one a row; None if all are empty."""
    width = max(map(len, found), default=0)
    if not width:
        return None
    tokens = np.full((len(found), width), -1, np.int32)
    for index, drafts in enumerate(found):
        tokens[index, : len(drafts)] = drafts
    return Drafts(tokens)
