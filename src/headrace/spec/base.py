"""Speculation: what a proposer is. Verification is the sampler's (sampling/sampler.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace.ops.xp import Array


@dataclass(frozen=True)
class Drafts:
    """Proposed tokens of R rows, to be verified in the next step."""

    tokens: np.ndarray  # int32 [R, K]; -1 pads
    probs: Array | None = None  # float32 [R, K, V], for residual verification
    tree: Array | None = None  # int32 [R, K] parent of each node; None: a chain


@dataclass(frozen=True)
class DraftContext:
    """What a proposer may look at after a step has been sampled."""

    rows: np.ndarray  # int32 [R]  rows that may get drafts
    token_ids: np.ndarray  # int32 [max rows, max length]  the request table's tokens
    num_tokens: np.ndarray  # int32 [max rows]
    limits: list[int]  # most drafts that each of `rows` may get; 0: none
    hidden: Array | None = None  # float [T, H], if the proposer needs it


class Proposer(Protocol):
    """Guesses tokens ahead."""

    def admit(self, rows: list[int]) -> None:
        """These rows hold new sequences from now on."""
        ...

    def propose(self, context: DraftContext) -> Drafts | None:
        """Drafts for the context's rows, or None for no drafts at all."""
        ...


class NullProposer:
    """Guesses nothing."""

    def admit(self, rows: list[int]) -> None:
        pass

    def propose(self, context: DraftContext) -> Drafts | None:
        return None
