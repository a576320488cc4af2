"""What a scheduler works within, what it writes down while it plans, and the plan while it is being made."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace.core.plan import Admit, Fork, NewBlocks, StepPlan
from headrace.core.prefix import Miss
from headrace.core.request import Request


@dataclass(frozen=True)
class SchedulerLimits:
    """Resolved numbers the scheduler works within."""

    max_num_seqs: int  # rows of the request table
    max_num_batched_tokens: int  # token budget of a step, at least max_num_seqs
    max_model_len: int  # prompt and output together
    policy: str = "fcfs"

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running request can decode in one step"
            )

    @property
    def share(self) -> int:
        """Tokens of a step kept for the prompts with the least left, so that they need not wait behind long ones."""
        return max(1, self.max_num_batched_tokens // 4)


@dataclass(frozen=True)
class PrefixUse:
    """What the prefix cache did for a request when it was first admitted."""

    request_id: str
    num_tokens: int  # known then
    num_cached: int  # of them, found computed
    miss: Miss | None  # why not more


@dataclass
class StepTrace:
    """What the scheduler saw and refused while making one plan; for the ledger."""

    num_running: int = 0
    num_waiting: int = 0
    refusals: list[str] = field(default_factory=list)
    decisions: list[tuple[str, ...]] = field(default_factory=list)  # (what, chosen, reason, alternatives ...)
    preempted: list[str] = field(default_factory=list)
    prefixes: list[PrefixUse] = field(default_factory=list)  # of the requests admitted for the first time


@dataclass
class PlanBuilder:
    """A plan being made: spans are added one by one, within a budget of tokens."""

    step_id: int
    budget: int
    spare: int = 0  # tokens of the budget that drafts may take
    requests: list[Request] = field(default_factory=list)  # of each span; its row and first position:
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    # span -> (length, num_drafts, yields), of those that are not one token that yields
    others: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    prefilling: list[Request] = field(default_factory=list)  # running, with more than a token to go; oldest first
    admits: list[Admit] = field(default_factory=list)
    new_blocks: list[NewBlocks] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_runs: int = 1

    @property
    def num_tokens(self) -> int:
        return len(self.rows) + sum(length - 1 for length, _, _ in self.others.values())

    def add(self, request: Request, length: int, num_drafts: int, yields: bool) -> None:
        """The request's next `length` tokens, of which the last `num_drafts` are drafts."""
        if length != 1 or num_drafts or not yields:
            self.others[len(self.requests)] = length, num_drafts, yields
        self.requests.append(request)
        self.rows.append(request.row)
        self.starts.append(request.num_scheduled)
        self.budget -= length
        request.scheduled_in = self.step_id
        request.num_scheduled += length

    def spans(self) -> np.ndarray:
        """int32 [4, S], as in a StepPlan."""
        spans = np.empty((4, len(self.rows)), np.int32)
        spans[0], spans[1], spans[2], spans[3] = self.rows, self.starts, 1, 0
        for span, (length, num_drafts, _) in self.others.items():
            spans[2, span], spans[3, span] = length, num_drafts
        return spans

    def build(
        self,
        forks: list[Fork],
        fork_blocks: list[NewBlocks],
        released: list[int],
        draft_limits: np.ndarray | None = None,
    ) -> StepPlan:
        """The plan, with what has happened to rows since the last one."""
        yields = np.ones(len(self.rows), bool)
        if self.others:
            yields[[span for span, (_, _, yields) in self.others.items() if not yields]] = False
        return StepPlan(
            self.step_id,
            spans=self.spans(),
            admits=tuple(self.admits),
            forks=tuple(forks),
            new_blocks=(*fork_blocks, *self.new_blocks),
            block_copies=tuple(self.copies),
            released=tuple(released),
            yields=yields,
            num_runs=self.num_runs,
            draft_limits=draft_limits,
        )
