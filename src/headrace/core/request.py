"""Request: one sequence's life in the engine, and what the engine reports of it."""

from __future__ import annotations

import itertools
import time
from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from headrace.core.plan import TokenLogprobs
from headrace.sampling.params import BadWords, SamplingParams

if TYPE_CHECKING:
    from headrace.core.beam import BeamGroup

_arrivals = itertools.count()


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's limit
    ABORT = "abort"  # the client asked
    ERROR = "error"  # the engine could not go on with it


class RequestError(ValueError):
    """A request that cannot be served as asked; the message says what would do. `param`: the API's field at fault."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one prompt, from arrival to its finish reason.

    Counters, in tokens: KV exists for `num_computed`; steps, those in flight included, have been given `num_scheduled`.
    What the scheduler may still hand out is `num_unscheduled`.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_new_tokens: int  # resolved: max_tokens or what the model's limit leaves
    stop_ids: frozenset[int] = frozenset()  # resolved: end-of-sequence ids (unless ignored) and stop_token_ids
    seed: int = 0  # resolved
    choice: int = 0
    priority: int = 0  # lower is served first
    batch: bool = False  # nobody waits for its tokens as they come: it gives way to those that somebody waits for
    quiet: bool = False  # nobody looks at its tokens before it ends: then they are told, all at once
    bad_words: BadWords | None = None  # resolved from params.bad_words
    cache_salt: str | None = None  # prefixes are shared within a salt only
    adapter: str | None = None  # and within an adapter
    beam: BeamGroup | None = field(default=None, repr=False)  # the beam search that it is a member of
    leader: Request | None = field(default=None, repr=False)  # a request with the same prompt, whose blocks are shared
    arrival: float = field(default_factory=time.monotonic)
    order: int = field(default_factory=lambda: next(_arrivals))  # total order of arrival

    token_ids: list[int] = field(init=False)  # prompt, then output
    prompt_len: int = field(init=False)
    max_len: int = field(init=False)  # tokens at which it ends
    row: int = field(default=-1, init=False)  # -1: not in the table
    admitted: bool = field(default=False, init=False)  # a step has been told of it, ever
    num_computed: int = field(default=0, init=False)
    num_scheduled: int = field(default=0, init=False)
    runs_ahead: bool = field(default=True, init=False)  # may be scheduled before its last step's tokens are known
    repeats: bool = field(default=False, init=False)  # its step may run several times before the host looks at it
    num_drafts: int = field(default=0, init=False)  # that the worker holds for its next step
    draft_values: list[float] = field(default_factory=list, init=False)  # of a tree: how likely each node is accepted
    draft_source: int = field(default=0, init=False)  # which of the engine's proposers made them
    acceptance: dict[int, float] = field(default_factory=dict, init=False)  # a draft policy's estimate, by proposer
    promise: dict[int, float] = field(default_factory=dict, init=False)  # drafts accepted for each that a tree's values
    # promised, by proposer
    speculates: bool = field(default=False, init=False)  # its last step had drafts to verify
    drafts_verified: int = field(default=0, init=False)
    drafts_accepted: int = field(default=0, init=False)
    scheduled_in: int = field(default=-1, init=False)  # the last step that got a span of it
    num_slots: int = field(default=0, init=False)  # tokens that the blocks held have room for
    num_preemptions: int = field(default=0, init=False)
    num_cached: int = field(default=0, init=False)  # prompt tokens found in the prefix cache when first admitted
    num_entered: int = field(default=0, init=False)  # blocks of this stay that the prefix cache knows
    block_keys: list[bytes] = field(default_factory=list, init=False, repr=False)  # chained keys of its full blocks
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)  # of positions 1, 2 ... so far
    finish_reason: FinishReason | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.prompt_len = len(self.prompt_token_ids)
        self.max_len = self.prompt_len + self.max_new_tokens

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def num_unscheduled(self) -> int:
        """Known or promised tokens that no step has been given; 0 also once the last allowed token is promised. Steps
        in flight that have been given all known tokens promise the one after the last that they were given."""
        promised = len(self.token_ids)
        if self.runs_ahead and self.num_scheduled >= promised:
            promised = self.num_scheduled + 1
        return 0 if promised >= self.max_len else promised - self.num_scheduled

    @property
    def untold_ids(self) -> list[int]:
        """Its output, where nobody has been told of it yet."""
        return self.output_token_ids if self.quiet else []

    @property
    def is_plain(self) -> bool:
        """Neither in a beam nor under a grammar: what its next token may be does not depend on the host."""
        return self.beam is None and self.params.grammar is None

    def run_ahead(self, allowed: bool) -> None:
        """Whether its steps may be scheduled ahead of their results, as far as it lets them. Several runs of a step are
        for it alone to allow."""
        self.runs_ahead = allowed and self.is_plain
        self.repeats = self.is_plain and self.params.is_simple

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Every prompt position must run through the model, so no prefix hit may skip one."""
        return self.params.prompt_logprobs is not None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def token_bytes(self, start: int, end: int) -> bytes:
        """Tokens start..end-1 as int32, little endian."""
        return array("i", self.token_ids[start:end]).tobytes()

    def become_dormant(self) -> None:
        """A beam's member that is no live sequence: it keeps its row and has nothing to run."""
        self.max_len = 0
        self.num_computed = self.num_scheduled = self.num_slots = self.num_entered = 0

    def continue_from(self, parent: Request, token: int) -> None:
        """A beam's member becomes what `parent` is, and one token more."""
        self.token_ids = [*parent.token_ids, token]
        self.block_keys = list(parent.block_keys)
        self.max_len = parent.max_len

    def leave_table(self) -> None:
        """Forget the row and everything computed (preemption, end); steps in flight no longer count."""
        self.row = -1
        self.num_computed = self.num_scheduled = self.num_slots = self.num_entered = 0
        self.num_drafts = 0


class TokenOutput(NamedTuple):
    """What one step brought one request."""

    request_id: str
    token_ids: list[int]  # new tokens; the one that stopped the request is included
    finish_reason: FinishReason | None = None
    error: str | None = None  # with FinishReason.ERROR: what happened
    logprobs: list[TokenLogprobs] | None = None  # of each new token, if asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's second token on; with the first new token
    num_cached: int = 0  # prompt tokens that the prefix cache had
    score: float | None = None  # beam search: log-probability / length ** length_penalty
