"""The nouns of a step. Everything that crosses from the scheduler to a worker and back is defined here.

Glossary
  request   one sequence to be generated: prompt token ids, sampling parameters, one choice of `n`.
  row       a request's place in the worker's request table, from admission until release.
  span      consecutive tokens of one row that one step runs through the model: (row, start, length, num_drafts).
            A chunk of prefill, the rest after a prefix hit, a decode and a verification of drafts are all spans.
  step      one pass of the model over the spans of a plan; `step_id` numbers them from 0.
  block     `block_size` consecutive token positions of KV cache, the unit of allocation.
  slot      one token's place inside a block: block id * block_size + offset.
  draft     a proposed token that a step verifies.
  plan      what the scheduler wants of a step; result: what came back.
A span yields a token when it reaches the end of the tokens known for its row; a span that stops earlier
(prefill not finished) yields none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from headrace.sampling.params import BadWords, SamplingParams

NO_SPANS = np.zeros((4, 0), np.int32)
NO_SPANS.flags.writeable = False


class Logprob(NamedTuple):
    """How likely the model itself held one token to be, before any sampling option."""

    logprob: float  # natural logarithm, finite and at most 0
    rank: int  # 1: the most likely; of equals the lower id comes first


TokenLogprobs = dict[int, Logprob]  # of one position: its own token and those asked for, most likely first


@dataclass(frozen=True)
class Admit:
    """A request entering the table, new or again after preemption (then `token_ids` holds its output so far too)."""

    row: int
    request_id: str
    token_ids: list[int]  # prompt, then output so far
    prompt_len: int
    num_computed: int  # tokens whose KV is already in the given blocks (a prefix hit)
    params: SamplingParams
    seed: int  # resolved: the request's own, or one drawn for it
    choice: int  # which of the request's n choices
    stop_ids: frozenset[int]  # tokens that end it, banned while fewer than min_tokens came
    bad_words: BadWords | None = None  # resolved from params.bad_words
    cache_salt: str | None = None  # what is remembered of it is for requests of the same salt


class NewBlocks(NamedTuple):
    """Blocks appended to one row's table in one layer group."""

    row: int
    group: int
    start: int  # index in the row's table where `ids` go
    ids: list[int]


class Fork(NamedTuple):
    """A row takes over another's state (or keeps its own), with another last token. All forks happen at once."""

    source: int
    row: int
    token: int


@dataclass(frozen=True)
class StepPlan:
    """What one step does. Applied by the worker in the order: released, admits, forks, new_blocks, block_copies,
    spans."""

    step_id: int
    spans: np.ndarray = field(default_factory=lambda: NO_SPANS)  # int32 [4, S]: row, start, length, num_drafts
    admits: tuple[Admit, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    forks: tuple[Fork, ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()  # (source block, destination block): copy-on-write
    released: tuple[int, ...] = ()  # rows whose requests ended or were preempted
    yields: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # bool [S]: the span reaches its row's end
    # the step runs so many times, each from the tokens that the run before drew; above 1 all spans are single tokens,
    # or a token and as many drafts each. Of those it may run fewer times, mostly once: where nothing can draft between.
    num_runs: int = 1
    # int32 [P, S]: most drafts by each proposer after the span; P = 0: none is asked; None: no bound
    draft_limits: np.ndarray | None = None

    @property
    def rows(self) -> np.ndarray:
        return self.spans[0]

    @property
    def starts(self) -> np.ndarray:
        """First position of each span; with several steps in flight, an upper bound (the table knows)."""
        return self.spans[1]

    @property
    def lengths(self) -> np.ndarray:
        return self.spans[2]

    @property
    def num_drafts(self) -> np.ndarray:
        return self.spans[3]

    @property
    def num_spans(self) -> int:
        return self.spans.shape[1]

    @cached_property
    def num_tokens(self) -> int:
        return int(self.spans[2].sum())

    @cached_property
    def num_decodes(self) -> int:
        """Leading spans that are one token that yields."""
        if self.num_tokens == self.num_spans and self.yields.all():
            return self.num_spans
        others = np.flatnonzero((self.spans[2] != 1) | (self.spans[3] != 0) | ~self.yields)
        return int(others[0]) if len(others) else self.num_spans

    @cached_property
    def generates(self) -> bool:
        """All spans yield and are one token, or one and its drafts: no prompts are in it."""
        if self.num_decodes == self.num_spans:
            return True
        return bool((self.yields & (self.spans[2] == self.spans[3] + 1)).all())

    @property
    def empty(self) -> bool:
        """Nothing to run and nothing to tell the worker."""
        return not (self.num_spans or self.admits or self.released or self.forks or self.block_copies)


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one step inside the worker, by stage."""

    prepare: float = 0.0  # table, batch, attention metadata
    forward: float = 0.0  # the model up to its last hidden states
    logits: float = 0.0  # output head
    sample: float = 0.0  # logits stages, sampling, verification, table update
    draft: float = 0.0  # proposing tokens for the next step

    @property
    def total(self) -> float:
        return self.prepare + self.forward + self.logits + self.sample + self.draft


class DraftPass(NamedTuple):
    """One pass of a drafting network, each of whose rows drafted one token."""

    num_rows: int
    seconds: float


@dataclass(frozen=True)
class StepResult:
    """What a step produced, in the order of the plan's spans."""

    step_id: int
    tokens: list[list[int]]  # per span; [] where prefill is not finished; accepted drafts first
    num_accepted: list[int]  # per span: drafts accepted
    num_runs: int = 1  # of the plan's, how many there were
    accepted_by_run: list[list[int]] = field(default_factory=list)  # per span: drafts accepted by each run of a step
    # that verified several times; []: it did not
    num_drafts: list[int] = field(default_factory=list)  # per span: drafts proposed for its next step; []: none
    draft_sources: list[int] = field(default_factory=list)  # per span: by which proposer
    # span whose drafts are a tree -> how likely each of its nodes is believed to be accepted, most likely first
    draft_values: dict[int, list[float]] = field(default_factory=dict)
    draft_passes: tuple[DraftPass, ...] = ()
    draft_seconds: tuple[float, ...] = ()  # what each of the engine's proposers took after this step; (): nobody says
    dropped: tuple[str, ...] = ()  # proposers that failed in this step and are not asked again
    warming: bool = False  # it made something that later steps find ready, or did without: they will take less time
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)  # span of a beam -> its best next
    # tokens with their log-probabilities after every stage, best first
    errors: dict[int, str] = field(default_factory=dict)  # span -> why it could not go on
    times: StageTimes = StageTimes()
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # span -> one entry a token, if asked for
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # span -> of the prompt tokens that
    # follow each of its tokens: positions start + 1, start + 2 ... as far as the prompt goes

    def accepted(self, span: int) -> Sequence[int]:
        """Drafts of the span that each run accepted."""
        return self.accepted_by_run[span] if self.accepted_by_run else (self.num_accepted[span],)

    @property
    def only_tokens(self) -> bool:
        """Nothing is told but the tokens; so every span that yields has one, and no beam is among them."""
        return not (self.errors or self.logprobs or self.prompt_logprobs or any(self.num_drafts) or self.candidates)
