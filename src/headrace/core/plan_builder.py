"""What a scheduler works within, what it writes down while it plans, and the plan while it is being made."""

from __future__ import annotations

from array import array
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
    spans: array[int] = field(default_factory=lambda: array("i"))  # row, start, length, num_drafts of each
    yields: list[bool] = field(default_factory=list)
    requests: list[tuple[Request, int]] = field(default_factory=list)  # (request, epoch) of each span
    prefilling: list[Request] = field(default_factory=list)  # running, with more than a token to go; oldest first
    admits: list[Admit] = field(default_factory=list)
    new_blocks: list[NewBlocks] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def add(self, request: Request, length: int, num_drafts: int, yields: bool) -> None:
        """The request's next `length` tokens, of which the last `num_drafts` are drafts."""
        self.spans.extend((request.row, request.num_computed + request.num_in_flight, length, num_drafts))
        self.yields.append(yields)
        self.requests.append((request, request.epoch))
        self.budget -= length
        request.scheduled_in = self.step_id
        request.num_in_flight += length
        request.num_pending += yields and request.runs_ahead

    def build(
        self,
        forks: list[Fork],
        fork_blocks: list[NewBlocks],
        released: list[int],
        draft_limits: np.ndarray | None = None,
    ) -> StepPlan:
        """The plan, with what has happened to rows since the last one."""
        return StepPlan(
            self.step_id,
            spans=np.array(self.spans, np.int32).reshape(-1, 4).T,
            admits=tuple(self.admits),
            forks=tuple(forks),
            new_blocks=(*fork_blocks, *self.new_blocks),
            block_copies=tuple(self.copies),
            released=tuple(released),
            yields=np.array(self.yields, bool),
            draft_limits=draft_limits,
        )
