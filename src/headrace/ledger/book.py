"""The step ledger: the latest step records and bills, totals of all, and a stream of lines.

    step = ledger.begin(step_id)           # an OpenStep: the scheduler and the loop write into it
    step.decide(...); step.refuse(...)
    step.work, step.times, ... = ...
    ledger.finish(step)                    # judged, frozen into a StepRecord, kept
    ledger.add_bill(bill)                  # of a request that ended

Rings hold the latest, totals cover the ledger's whole life, and a stream (optional) writes each entry as one line of
JSON. `NullLedger` takes the same calls and keeps nothing. Who writes may hold back some steps, which `settle` brings in
before anybody reads: so writers and readers are one thread, the engine's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from os import PathLike

from headrace.ledger.bill import Bill
from headrace.ledger.jsonl import Stream, to_line
from headrace.ledger.machine import MachineFacts, lasting, reached, remember
from headrace.ledger.record import BOUNDS, OpenStep, StepRecord


@dataclass(slots=True)
class Totals:
    """Sums over every step and every ended request of a ledger's life."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0  # of requests admitted, each counted once, at its first admission
    cached_tokens: int = 0  # of them, found in the prefix cache; what a preempted request finds again is in neither
    seconds: float = 0.0
    seconds_by_bound: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0.0))
    steps_by_bound: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0))
    draft_tokens: int = 0  # verified; speculation
    accepted_draft_tokens: int = 0
    drafts: dict[str, list[int]] = field(default_factory=dict)  # proposer -> [verified, accepted]
    draft_positions: list[list[int]] = field(default_factory=list)  # of each place in a draft: [verified, accepted]
    draft_seconds: float = 0.0  # that proposing took
    verify_seconds: float = 0.0  # that steps are predicted to have taken longer for the drafts in them
    wasted_seconds: float = 0.0  # of these, for drafts that were wrong
    proposers_dropped: int = 0  # proposers that failed
    preemptions: int = 0
    refusals: int = 0
    requests: int = 0  # ended
    recomputed_tokens: int = 0  # of ended requests

    @property
    def hit_rate(self) -> float:
        """Part of the prompt tokens asked for that the prefix cache had; 0 before any was asked for."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

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
        for use in record.prefixes:
            self.prompt_tokens += use.num_tokens
            self.cached_tokens += use.num_cached

    def add_drafts(self, verified: Iterable[tuple[str, int, int]], verify_seconds: float) -> None:
        """(proposer, drafts, accepted) of each span of a step that had drafts, which took it so much longer."""
        drafted = right = 0
        for proposer, num_drafts, num_accepted in verified:
            counts = self.drafts.setdefault(proposer, [0, 0])
            counts[0] += num_drafts
            counts[1] += num_accepted
            drafted, right = drafted + num_drafts, right + num_accepted
            while len(self.draft_positions) < num_drafts:
                self.draft_positions.append([0, 0])
            for position in range(num_drafts):
                self.draft_positions[position][0] += 1
                self.draft_positions[position][1] += position < num_accepted
        self.draft_tokens += drafted
        self.accepted_draft_tokens += right
        self.verify_seconds += verify_seconds
        self.wasted_seconds += verify_seconds * (1 - right / drafted) if drafted else 0.0

    def add_bill(self, bill: Bill) -> None:
        self.requests += 1
        self.recomputed_tokens += bill.recomputed_tokens


class Ledger:
    """The latest `capacity` records and as many bills, totals of all, and a stream to `stream_path` if given (appended
    to; OSError when it cannot be opened). Use as a context manager, or call `close` to write out what the stream
    still holds."""

    enabled = True

    def __init__(
        self, facts: MachineFacts, capacity: int = 4096, stream_path: str | PathLike[str] | None = None
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.facts = facts  # raised to what steps reach
        self.measured = facts
        self._lasting = facts
        self.settle: Callable[[], None] = lambda: None
        self._totals = Totals()
        self._capacity = capacity
        self._ring: deque[StepRecord] = deque(maxlen=capacity)
        self._bills: OrderedDict[str, Bill] = OrderedDict()
        self._stream = None if stream_path is None else Stream(stream_path)

    @property
    def totals(self) -> Totals:
        self.settle()
        return self._totals

    def begin(self, step_id: int) -> OpenStep:
        """Open the record of a step; several may be open at once."""
        return OpenStep(step_id)

    def finish(self, step: OpenStep) -> None:
        """Judge `step` and keep it."""
        self.add(step.close(self.facts))

    def add(self, record: StepRecord) -> None:
        """Keep a record; the oldest leaves a full ring. One that is above the roof raises it."""
        work, device = record.work, record.judgement.device_seconds
        facts = reached(self.facts, work.bytes_total, work.flops_total, device)
        if facts is not self.facts:
            self.facts = facts
            self._lasting = lasting(self._lasting, work.bytes_total, work.flops_total, device)
            record = record.judged(facts)
        self._ring.append(record)
        self._totals.add(record)
        if self._stream is not None:
            self._stream.add(record)

    def add_bill(self, bill: Bill) -> None:
        """Keep the bill of an ended request; it replaces one of the same id, and the oldest leaves when they are too
        many."""
        self._bills.pop(bill.request_id, None)
        self._bills[bill.request_id] = bill
        if len(self._bills) > self._capacity:
            self._bills.popitem(last=False)
        self._totals.add_bill(bill)
        if self._stream is not None:
            self._stream.add(bill)

    def records(self, last: int | None = None) -> list[StepRecord]:
        """The records in the ring, oldest first; only the `last` ones if given."""
        self.settle()
        records = list(self._ring)
        return records if last is None else records[max(len(records) - last, 0) :]

    def bills(self) -> list[Bill]:
        """The bills kept, in the order the requests ended."""
        self.settle()
        return list(self._bills.values())

    def bill(self, request_id: str) -> Bill | None:
        """The bill of an ended request, if it is still kept."""
        return self._bills.get(request_id)

    def __len__(self) -> int:
        """Records in the ring."""
        self.settle()
        return len(self._ring)

    @property
    def stream_error(self) -> str:
        """Why the stream ended early; "" while all is well."""
        return "" if self._stream is None else self._stream.error

    def stream_to(self, path: str | PathLike[str]) -> None:
        """Write every entry from now on to `path`, which is replaced, until `close`; OSError when it cannot be
        opened. An earlier stream is closed."""
        self.close()
        self._stream = Stream(path, append=False)

    def write_jsonl(self, path: str | PathLike[str]) -> int:
        """Write the records in the ring, then the bills, oldest first, one a line; say how many lines. Replaces the
        file; may raise OSError."""
        entries: list[StepRecord | Bill] = [*self.records(), *self.bills()]
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(to_line(entry) + "\n" for entry in entries)
        return len(entries)

    def flush(self) -> None:
        """Bring the stream's file up to date."""
        self.settle()
        if self._stream is not None:
            self._stream.flush()

    def close(self) -> None:
        """End the stream and keep the rates that steps reached; rings and totals stay readable."""
        self.settle()
        if self._lasting is not self.measured:
            remember(self._lasting)
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

    def add_bill(self, bill: Bill) -> None:
        pass
