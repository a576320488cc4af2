"""Sampling settings of every row of the request table, as columns, and a step's view of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.core.plan import Admit
from headrace.ops.xp import Array
from headrace.sampling.params import BadWords, Grammar

_NO_LIMIT = 2**31 - 1
_COOLEST = 1e-20  # lower temperatures are this one: a difference of 1e-17 logits then already decides


class SamplingTable:
    """One column per setting, one entry per row; written at admission."""

    def __init__(self, max_rows: int):
        self.plain = np.ones(max_rows, bool)  # its token is the largest logit's: no stage applies, nothing is told
        self.prompt_len = np.zeros(max_rows, np.int32)
        self.temperature = np.zeros(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int32)
        self.top_p = np.ones(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.repetition = np.ones(max_rows, np.float32)
        self.presence = np.zeros(max_rows, np.float32)
        self.frequency = np.zeros(max_rows, np.float32)
        self.penalised = np.zeros(max_rows, bool)  # any of the three above does something
        self.seed = np.zeros(max_rows, np.int64)
        self.choice = np.zeros(max_rows, np.int64)
        self.first_free = np.zeros(max_rows, np.int32)  # position from which stop tokens are allowed
        self.stop_ids: list[frozenset[int]] = [frozenset()] * max_rows
        self.biased = np.zeros(max_rows, bool)
        self.bias: list[tuple[np.ndarray, np.ndarray]] = [_NO_BIAS] * max_rows  # (ids int64, values float32)
        self.limited = np.zeros(max_rows, bool)  # to allowed_ids
        self.allowed_ids: list[np.ndarray] = [_NO_IDS] * max_rows  # int64
        self.censored = np.zeros(max_rows, bool)  # by bad_words
        self.bad_words: list[BadWords] = [_NO_WORDS] * max_rows
        self.constrained = np.zeros(max_rows, bool)  # by a grammar
        self.grammar: list[Grammar | None] = [None] * max_rows
        self.admission = np.zeros(max_rows, np.int64)  # counts the requests that the row has had
        self.logprobs = np.full(max_rows, -1, np.int32)  # how many of the best to report beside the chosen; -1: none
        self.prompt_logprobs = np.full(max_rows, -1, np.int32)  # the same of each prompt token
        self.max_drafts = np.zeros(max_rows, np.int32)  # most tokens that may be drafted at a time
        self.draft_start = np.zeros(max_rows, np.int32)  # position of a row's first draft
        # float32 [K, V] that a row's drafts were drawn from, where they were drawn and residual verification wants it
        self.draft_probs: list[Array | None] = [None] * max_rows
        self.candidates = np.zeros(max_rows, np.int32)  # best next tokens that a beam search asks for

    def set(self, admit: Admit) -> None:
        """Take over a request's settings."""
        row, params = admit.row, admit.params
        self.prompt_len[row] = admit.prompt_len
        self.temperature[row] = params.temperature and max(params.temperature, _COOLEST)
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.penalised[row] = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self.seed[row] = admit.seed
        self.choice[row] = admit.choice
        self.first_free[row] = admit.prompt_len + params.min_tokens
        self.stop_ids[row] = admit.stop_ids
        bias = dict(params.logit_bias)
        self.biased[row] = bool(bias)
        self.bias[row] = (np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32))
        self.limited[row] = params.allowed_token_ids is not None
        self.allowed_ids[row] = np.array(params.allowed_token_ids or (), np.int64)
        self.bad_words[row] = admit.bad_words or _NO_WORDS
        self.censored[row] = bool(self.bad_words[row].bans)
        self.plain[row] = params.is_simple and params.temperature == 0 and not self.censored[row]
        self.constrained[row] = params.grammar is not None
        self.grammar[row] = params.grammar
        self.admission[row] += 1
        limit = _NO_LIMIT if params.draft_tokens is None else params.draft_tokens
        self.max_drafts[row] = 0 if params.beam_width else limit
        # of all that a beam's continuations can end with, enough that `beam_width` are left which do not end
        self.candidates[row] = (params.beam_width or 0) * max(2, 1 + len(admit.stop_ids))
        self.logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.prompt_logprobs[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs


_NO_IDS = np.zeros(0, np.int64)
_NO_BIAS = (_NO_IDS, np.zeros(0, np.float32))
_NO_WORDS = BadWords({}, {})


@dataclass(frozen=True)
class TreeRows:
    """How L rows of logits hang together where a span is a token tree. Rows come after those they follow."""

    parents: np.ndarray  # int32 [L]  the row whose token comes before; -1: a tree's first row; -2: in no tree
    tokens: np.ndarray  # int32 [L]  the drafted token that a row stands after; of a tree's first row of no meaning


@dataclass(frozen=True)
class SamplingBatch:
    """What the stages and the draw know of L rows of logits."""

    table: SamplingTable
    rows: Array  # int32 [L]  row of the request table
    positions: Array  # int32 [L]  position in its sequence of the token to be drawn
    token_ids: Array  # int32 [max rows, max length]  the request table's: what precedes position p is [row, :p]
    stream: int = 0  # noise of its own, independent of that of other streams; 0: what texts are drawn with
    trees: TreeRows | None = None  # None: all spans are chains
    # of rows that stand behind nodes of a tree which is being made, the tokens on the way there; None: there are none
    paths: Sequence[Sequence[int]] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether all that decides is which logit is the largest: most steps, which can do without all else."""
        return bool(self.table.plain[self.rows].all())

    def before(self, index: int, start: int = 0) -> Array:
        """The sequence that row `index` of the logits continues, int32, from position `start` on. In a tree: the known
        tokens, then the drafts on the way to the row."""
        if self.paths is not None:
            path = list(self.paths[index])
            known = self.token_ids[int(self.rows[index]), : int(self.positions[index]) - len(path)]
            return np.concatenate([known, np.array(path, np.int32)])[start:]
        path = []
        while self.trees is not None and self.trees.parents[index] >= 0:
            path.append(int(self.trees.tokens[index]))
            index = int(self.trees.parents[index])
        known = self.token_ids[int(self.rows[index]), : int(self.positions[index])]
        return np.concatenate([known, np.array(path[::-1], np.int32)])[start:] if path else known[start:]
