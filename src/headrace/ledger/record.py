"""The step ledger: what each step did, how long each stage took, what bound it, what was decided and refused.

    step = ledger.begin(step_id)           # an OpenStep: the scheduler and the loop write into it
    step.decide(...); step.refuse(...)
    step.work, step.times, ... = ...
    ledger.finish(step)                    # judged, frozen into a StepRecord, kept

A ring holds the latest records, totals cover the ledger's whole life, and a stream (optional) writes each record as
one line of JSON. `NullLedger` takes the same calls and keeps nothing. One thread writes; readers take copies.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, NamedTuple, TextIO

import numpy as np

from headrace.core.plan import StageTimes, StepPlan
from headrace.ledger.machine import MachineFacts
from headrace.ledger.work import StepWork

Bound = Literal["host", "bandwidth", "compute"]
BOUNDS: tuple[Bound, ...] = ("bandwidth", "compute", "host")
STAGES = ("schedule", "prepare", "forward", "logits", "sample", "commit", "other")
NO_WORK, NO_TIMES = StepWork(), StageTimes()
ROOF_SHARE = 0.5  # a step whose model stages take more than 1 / ROOF_SHARE times their lower bound is not at the roof


class Decision(NamedTuple):
    """A choice made for one step."""

    what: str  # "chunk size", "drafts per row", ...
    chosen: str
    alternatives: tuple[str, ...] = ()
    reason: str = ""


class Judgement(NamedTuple):
    """What bound a step, with the seconds it was judged by. Shares above 1 mean that a cache held what memory should
    have sent, or that the machine was busy when it was measured."""

    bound: Bound
    device_seconds: float = 0.0  # stages forward and logits, measured
    outside_seconds: float = 0.0  # everything else, measured
    bandwidth_seconds: float = 0.0  # the least time to move the step's bytes
    compute_seconds: float = 0.0  # the least time to do its operations

    @property
    def bandwidth_share(self) -> float:
        """Part of the machine's bandwidth that the model's stages reached."""
        return self.bandwidth_seconds / self.device_seconds if self.device_seconds > 0 else 0.0

    @property
    def compute_share(self) -> float:
        """Part of the machine's FLOP rate that the model's stages reached."""
        return self.compute_seconds / self.device_seconds if self.device_seconds > 0 else 0.0

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
              and total - device, which also holds what no stage accounts for. `total` is the wall time that the step
              added, so with steps in flight it is counted from the commit before it.
    bw      = bytes / read bandwidth, compute = FLOP / FLOP rate: lower bounds of device

    1. outside > device                    -> "host": the model waited for Python more than Python waited for it.
    2. max(bw, compute) < `roof` * device  -> "host": neither memory nor arithmetic explains the time; what is left is
       dispatch: launches, interpreter, small shapes. A kernel far from its roof lands here too, on purpose: calling it
       bound by bandwidth would promise that fewer bytes help. `outside_seconds` tells this case from the first.
    3. otherwise                           -> "compute" if compute > bw else "bandwidth".
    A step that ran no model is "host".
    """
    device = times.forward + times.logits
    rest = max(outside + times.prepare + times.sample, total - device, 0.0)
    bandwidth = work.bytes_total / facts.read_bandwidth
    compute = work.flops_total / facts.flops
    bound: Bound
    if rest > device or max(bandwidth, compute) < roof * device or device <= 0.0:
        bound = "host"
    else:
        bound = "compute" if compute > bandwidth else "bandwidth"
    return Judgement(bound, device, rest, bandwidth, compute)


def split_tokens(plan: StepPlan) -> tuple[int, int]:
    """(prefill, decode) tokens that `plan` runs. A decode token belongs to a span that yields and is one token and its
    drafts long; the last single token of a prompt is therefore a decode token, which is what it costs."""
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
    predicted: float  # of `total`, said before the step ran; 0: no prediction was made
    judgement: Judgement
    decisions: tuple[Decision, ...] = ()
    refusals: tuple[str, ...] = ()  # "request 7 not admitted: needs 12 blocks, 3 free"
    preempted: tuple[str, ...] = ()  # request ids

    @property
    def bound(self) -> Bound:
        return self.judgement.bound

    @property
    def other(self) -> float:
        """Seconds of `total` that no stage accounts for."""
        return max(self.total - self.schedule - self.times.total - self.commit, 0.0)

    def stages(self) -> tuple[float, ...]:
        """Seconds of each of `STAGES`."""
        times = self.times
        return (self.schedule, times.prepare, times.forward, times.logits, times.sample, self.commit, self.other)

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
                times=StageTimes(**{name: _number(times[name]) for name in _TIMES}),
                judgement=Judgement(judgement["bound"], *(_number(judgement[name]) for name in Judgement._fields[1:])),
                decisions=tuple(
                    Decision(d["what"], d["chosen"], tuple(d["alternatives"]), d["reason"]) for d in value["decisions"]
                ),
                refusals=tuple(value["refusals"]),
                preempted=tuple(value["preempted"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a step record: {type(error).__name__}: {error}") from None


_TIMES = ("prepare", "forward", "logits", "sample")
_COMPOUND = {"work", "times", "judgement", "decisions", "refusals", "preempted"}
_SCALARS = tuple(name for name in StepRecord.__dataclass_fields__ if name not in _COMPOUND)


def _number(value: Any) -> Any:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"a number was expected, not {value!r}")
    return value


def _finite(value: Any) -> Any:
    """`value` with every number that JSON cannot hold replaced by None, and numpy's numbers by Python's."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))  # made once: `dumps` would make one a call


def to_line(record: StepRecord) -> str:
    """The record as one line of strict JSON, without the newline."""
    value = record.to_json()
    try:
        return _ENCODER.encode(value)
    except (ValueError, TypeError):  # the rare record with such a number pays for the clean copy
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"), default=str)


def read_jsonl(path: str | PathLike[str]) -> list[StepRecord]:
    """The records of a file. A line that is no JSON was cut short when its process died, and is dropped; JSON that is
    no record is a ValueError that names the line."""
    records = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            try:
                records.append(StepRecord.from_json(value))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    return records


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
            tuple(self.decisions), tuple(self.refusals), tuple(self.preempted),
        )  # fmt: skip


@dataclass(slots=True)
class Totals:
    """Sums over every step of a ledger's life."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    seconds_by_bound: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0.0))
    steps_by_bound: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0))
    preemptions: int = 0
    refusals: int = 0

    def add(self, record: StepRecord) -> None:
        bound = record.judgement.bound
        self.steps += 1
        self.prefill_tokens += record.num_prefill_tokens
        self.decode_tokens += record.num_decode_tokens
        self.output_tokens += record.num_output_tokens
        self.seconds += record.total
        self.seconds_by_bound[bound] += record.total
        self.steps_by_bound[bound] += 1
        self.preemptions += len(record.preempted)
        self.refusals += len(record.refusals)


class _Stream:
    """Lines that reach the disk in batches: when `every` wait, when the oldest is `seconds` old, and at the end.

    A file that cannot be written ends the stream, never the engine; `error` then says why.
    """

    def __init__(self, path: str | PathLike[str], every: int = 64, seconds: float = 1.0) -> None:
        self.error = ""
        self._every, self._seconds = every, seconds
        self._waiting: list[StepRecord] = []
        self._oldest = 0.0
        self._file: TextIO | None = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by `close`
        if self._file.tell():
            self._file.write("\n")  # should the last writer have died within a line, ours start on a fresh one

    def add(self, record: StepRecord) -> None:
        if self._file is None:
            return
        now = time.monotonic()
        if not self._waiting:
            self._oldest = now
        self._waiting.append(record)
        if len(self._waiting) >= self._every or now - self._oldest >= self._seconds:
            self.flush()

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._file is None or not waiting:
            return
        try:
            self._file.write("".join(to_line(record) + "\n" for record in waiting))
            self._file.flush()
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        self.flush()
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.error = f"{type(error).__name__}: {error}"
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # closing writes again what could not be written
                file.close()


class Ledger:
    """The latest `capacity` records, totals of all, and a stream to `stream_path` if given (appended to; OSError when
    it cannot be opened). Use as a context manager, or call `close` to write out what the stream still holds."""

    enabled = True

    def __init__(
        self, facts: MachineFacts, capacity: int = 4096, stream_path: str | PathLike[str] | None = None
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.facts = facts
        self.totals = Totals()
        self._ring: deque[StepRecord] = deque(maxlen=capacity)
        self._stream = None if stream_path is None else _Stream(stream_path)

    def begin(self, step_id: int) -> OpenStep:
        """Open the record of a step; several may be open at once."""
        return OpenStep(step_id)

    def finish(self, step: OpenStep) -> None:
        """Judge `step` and keep it."""
        self.add(step.close(self.facts))

    def add(self, record: StepRecord) -> None:
        """Keep a record; the oldest leaves a full ring."""
        self._ring.append(record)
        self.totals.add(record)
        if self._stream is not None:
            self._stream.add(record)

    def records(self, last: int | None = None) -> list[StepRecord]:
        """The records in the ring, oldest first; only the `last` ones if given."""
        records = list(self._ring)
        return records if last is None else records[max(len(records) - last, 0) :]

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def stream_error(self) -> str:
        """Why the stream ended early; "" while all is well."""
        return "" if self._stream is None else self._stream.error

    def write_jsonl(self, path: str | PathLike[str]) -> int:
        """Write the ring's records, oldest first, one a line; say how many. Replaces the file; may raise OSError."""
        records = self.records()
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(to_line(record) + "\n" for record in records)
        return len(records)

    def flush(self) -> None:
        """Bring the stream's file up to date."""
        if self._stream is not None:
            self._stream.flush()

    def close(self) -> None:
        """End the stream; the ring and the totals stay readable. Calling it again does nothing."""
        if self._stream is not None:
            self._stream.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NullLedger(Ledger):
    """Takes every call and keeps nothing; `enabled` lets a loop skip what only a record needs."""

    enabled = False

    def __init__(self) -> None:
        super().__init__(MachineFacts("none", 1.0, 1.0, 1, 0.0), capacity=1)

    def finish(self, step: OpenStep) -> None:
        pass

    def add(self, record: StepRecord) -> None:
        pass
