"""The record of one step: what it did, how long each stage took, what bound it, what was decided and refused.

An `OpenStep` is written into while the step runs; `close` judges it and freezes it into a `StepRecord`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from headrace.core.plan import StageTimes, StepPlan
from headrace.core.plan_builder import PrefixUse
from headrace.core.prefix import Miss
from headrace.ledger.machine import MachineFacts
from headrace.ledger.work import StepWork

Bound = Literal["host", "bandwidth", "compute"]
BOUNDS: tuple[Bound, ...] = ("bandwidth", "compute", "host")
STAGES = ("schedule", "prepare", "forward", "logits", "sample", "draft", "commit", "other")
NO_WORK, NO_TIMES = StepWork(), StageTimes()
ROOF_SHARE = 0.5  # a step whose model stages take more than 1 / ROOF_SHARE times their lower bound is not at the roof


class Decision(NamedTuple):
    """A choice made for one step."""

    what: str  # "chunk size", "drafts per row", ...
    chosen: str
    alternatives: tuple[str, ...] = ()
    reason: str = ""


class DraftUse(NamedTuple):
    """What became of the drafts of one proposer in one step."""

    proposer: str
    num_spans: int
    num_drafts: int
    num_accepted: int


class Judgement(NamedTuple):
    """What bound a step, with the seconds it was judged by. A ledger raises the machine's rates to what steps reach, so
    shares above 1 are only in files of older versions; they read as 1."""

    bound: Bound
    device_seconds: float = 0.0  # stages forward and logits, measured
    outside_seconds: float = 0.0  # everything else, measured
    bandwidth_seconds: float = 0.0  # the least time to move the step's bytes
    compute_seconds: float = 0.0  # the least time to do its operations

    @property
    def bandwidth_share(self) -> float:
        """Part of the machine's bandwidth that the model's stages reached."""
        return min(self.bandwidth_seconds / self.device_seconds, 1.0) if self.device_seconds > 0 else 0.0

    @property
    def compute_share(self) -> float:
        """Part of the machine's FLOP rate that the model's stages reached."""
        return min(self.compute_seconds / self.device_seconds, 1.0) if self.device_seconds > 0 else 0.0

    @property
    def roof_share(self) -> float:
        """Part of the roofline reached: the larger of the two shares."""
        return max(self.bandwidth_share, self.compute_share)


def judge(
    facts: MachineFacts, work: StepWork, times: StageTimes, outside: float, total: float = 0.0, roof: float = ROOF_SHARE
) -> Judgement:
    """Say what bound a step.

    device  = forward + logits, the stages that run the model
    outside = the larger of the other stages' sum (`outside` + prepare + sample; `outside` holds schedule and commit)
              and total - device - draft, which also holds what no stage accounts for. `total` is the wall time that the
              step added, so with steps in flight it is counted from the commit before it.
    bw      = bytes / read bandwidth, compute = FLOP / FLOP rate: lower bounds of device

    1. outside > device                    -> "host": the model waited for Python more than Python waited for it.
    2. max(bw, compute) < `roof` * device  -> "host": neither memory nor arithmetic explains the time; what is left is
       dispatch: launches, interpreter, small shapes. A kernel far from its roof lands here too, on purpose: calling it
       bound by bandwidth would promise that fewer bytes help. `outside_seconds` tells this case from the first.
    3. otherwise                           -> "compute" if compute > bw else "bandwidth".
    A step that ran no model is "host".
    """
    device = times.forward + times.logits
    rest = max(outside + times.prepare + times.sample, total - device - times.draft, 0.0)
    bandwidth = work.bytes_total / facts.read_bandwidth
    compute = work.flops_total / facts.flops
    bound: Bound
    if rest > device or max(bandwidth, compute) < roof * device or device <= 0.0:
        bound = "host"
    else:
        bound = "compute" if compute > bandwidth else "bandwidth"
    return Judgement(bound, device, rest, bandwidth, compute)


def split_tokens(plan: StepPlan, num_runs: int = 1) -> tuple[int, int]:
    """(prefill, decode) tokens that `plan` runs in so many runs. A decode token belongs to a span that yields and is
    one token and its drafts long; the last single token of a prompt is therefore a decode token, which is what it
    costs."""
    if plan.num_decodes == plan.num_spans:  # told in less time
        return 0, plan.num_spans * num_runs
    if plan.generates:
        return 0, plan.num_tokens * num_runs
    lengths = plan.lengths
    decode = int(lengths[plan.yields & (lengths == plan.num_drafts + 1)].sum())
    return int(lengths.sum()) - decode, decode


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as it happened. Times are seconds, sizes bytes."""

    step_id: int
    started_at: float  # wall clock, seconds since the epoch
    num_spans: int
    num_prefill_tokens: int  # run by the model
    num_decode_tokens: int  # run by the model, drafts included
    num_output_tokens: int  # given to requests
    num_rows: int  # requests running
    num_waiting: int
    blocks_free: int
    blocks_total: int
    work: StepWork
    schedule: float
    times: StageTimes  # the worker's stages
    commit: float
    total: float  # wall seconds that the step added
    predicted: float  # of `total`, said before the step was learnt from; 0: no prediction was made
    judgement: Judgement
    decisions: tuple[Decision, ...] = ()
    refusals: tuple[str, ...] = ()  # "request 7 not admitted: needs 12 blocks, 3 free"
    preempted: tuple[str, ...] = ()  # request ids
    prefixes: tuple[PrefixUse, ...] = ()  # what the prefix cache did for the requests admitted for the first time
    drafts: tuple[DraftUse, ...] = ()  # verified, by proposer

    @property
    def bound(self) -> Bound:
        return self.judgement.bound

    def judged(self, facts: MachineFacts) -> StepRecord:
        """The record, judged by other rates."""
        return replace(self, judgement=judge(facts, self.work, self.times, self.schedule + self.commit, self.total))

    @property
    def other(self) -> float:
        """Seconds of `total` that no stage accounts for."""
        return max(self.total - self.schedule - self.times.total - self.commit, 0.0)

    def stages(self) -> tuple[float, ...]:
        """Seconds of each of `STAGES`."""
        times = self.times
        return (
            self.schedule, times.prepare, times.forward, times.logits, times.sample, times.draft, self.commit,
            self.other,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the bound up front for whoever greps the file; `from_json` reverses it."""
        value: dict[str, Any] = {name: getattr(self, name) for name in _SCALARS}
        value["bound"] = self.judgement.bound
        value["times"] = {name: getattr(self.times, name) for name in _TIMES}
        value["work"] = self.work._asdict()
        value["judgement"] = self.judgement._asdict()
        value["decisions"] = [decision._asdict() for decision in self.decisions]
        value["refusals"] = self.refusals
        value["preempted"] = self.preempted
        value["prefixes"] = [_use_to_json(use) for use in self.prefixes]
        value["drafts"] = [use._asdict() for use in self.drafts]
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> StepRecord:
        """A record from `to_json`'s value; a number written as null (it was not finite) is read as NaN. Fields this
        version does not know are ignored. Raises ValueError when one is missing or of the wrong kind."""
        try:
            scalars = {name: _number(value[name]) for name in _SCALARS}
            work, judgement, times = value["work"], value["judgement"], value["times"]
            return cls(
                **scalars,
                work=StepWork(**{name: _number(work[name]) for name in StepWork._fields}),
                times=StageTimes(**{name: _number(times[name]) for name in _TIMES if name in times or name != "draft"}),
                judgement=Judgement(judgement["bound"], *(_number(judgement[name]) for name in Judgement._fields[1:])),
                decisions=tuple(
                    Decision(d["what"], d["chosen"], tuple(d["alternatives"]), d["reason"]) for d in value["decisions"]
                ),
                refusals=tuple(value["refusals"]),
                preempted=tuple(value["preempted"]),
                prefixes=tuple(_use_from_json(use) for use in value.get("prefixes", ())),
                drafts=tuple(
                    DraftUse(str(use["proposer"]), *(_number(use[name]) for name in DraftUse._fields[1:]))
                    for use in value.get("drafts", ())
                ),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a step record: {type(error).__name__}: {error}") from None


_TIMES = ("prepare", "forward", "logits", "sample", "draft")  # files of older versions have no "draft"
_COMPOUND = {"work", "times", "judgement", "decisions", "refusals", "preempted", "prefixes", "drafts"}
_SCALARS = tuple(name for name in StepRecord.__dataclass_fields__ if name not in _COMPOUND)


def _use_to_json(use: PrefixUse) -> dict[str, Any]:
    value: dict[str, Any] = {"request_id": use.request_id, "num_tokens": use.num_tokens, "num_cached": use.num_cached}
    if use.miss is not None:
        value |= {"position": use.miss.position, "reason": use.miss.reason}
    return value


def _use_from_json(value: dict[str, Any]) -> PrefixUse:
    miss = Miss(_number(value["position"]), value["reason"]) if "reason" in value else None
    return PrefixUse(value["request_id"], _number(value["num_tokens"]), _number(value["num_cached"]), miss)


def _number(value: Any) -> Any:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"a number was expected, not {value!r}")
    return value


@dataclass(slots=True)
class OpenStep:
    """A step being recorded: fields of StepRecord, filled as they become known."""

    step_id: int
    started_at: float = field(default_factory=time.time)
    num_spans: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_output_tokens: int = 0
    num_rows: int = 0
    num_waiting: int = 0
    blocks_free: int = 0
    blocks_total: int = 0
    work: StepWork = NO_WORK
    schedule: float = 0.0
    times: StageTimes = NO_TIMES
    commit: float = 0.0
    total: float = 0.0  # 0: the stages' sum
    predicted: float = 0.0
    decisions: list[Decision] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    prefixes: list[PrefixUse] = field(default_factory=list)
    drafts: tuple[DraftUse, ...] = ()

    def decide(self, what: str, chosen: str, alternatives: Iterable[str] = (), reason: str = "") -> None:
        """Note a choice."""
        self.decisions.append(Decision(what, chosen, tuple(alternatives), reason))

    def refuse(self, reason: str) -> None:
        """Note what was not done, and why."""
        self.refusals.append(reason)

    def close(self, facts: MachineFacts) -> StepRecord:
        """Judge the step and freeze it."""
        times = self.times
        total = self.total or self.schedule + times.total + self.commit
        return StepRecord(
            self.step_id, self.started_at, self.num_spans, self.num_prefill_tokens, self.num_decode_tokens,
            self.num_output_tokens, self.num_rows, self.num_waiting, self.blocks_free, self.blocks_total, self.work,
            self.schedule, times, self.commit, total, self.predicted,
            judge(facts, self.work, times, self.schedule + self.commit, total),
            tuple(self.decisions), tuple(self.refusals), tuple(self.preempted), tuple(self.prefixes),
            self.drafts,
        )  # fmt: skip
