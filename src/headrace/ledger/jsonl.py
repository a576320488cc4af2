"""A ledger as lines of JSON: {"kind": "step", ...} for each step, {"kind": "request", ...} for each ended request."""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, TextIO

import numpy as np

from headrace.ledger.bill import Bill
from headrace.ledger.record import StepRecord

_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))  # made once: `dumps` would make one a call


def _finite(value: Any) -> Any:
    """`value` with every number that JSON cannot hold replaced by None, and numpy's numbers by Python's."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_line(entry: StepRecord | Bill) -> str:
    """The entry as one line of strict JSON, without the newline."""
    value = {"kind": "request" if isinstance(entry, Bill) else "step", **entry.to_json()}
    try:
        return _ENCODER.encode(value)
    except (ValueError, TypeError):  # the rare record with such a number pays for the clean copy
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"), default=str)


@dataclass
class LedgerFile:
    """What a file of lines holds, in its order."""

    records: list[StepRecord] = field(default_factory=list)
    bills: list[Bill] = field(default_factory=list)


def read_ledger(path: str | PathLike[str]) -> LedgerFile:
    """The entries of a file. A line that is no JSON was cut short when its process died, and is dropped; so is a kind
    that this version does not know. JSON that is no entry is a ValueError that names the line; OSError as `open`."""
    found = LedgerFile()
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            try:
                kind = value.get("kind", "step") if isinstance(value, dict) else "step"  # older files hold steps only
                if kind == "step":
                    found.records.append(StepRecord.from_json(value))
                elif kind == "request":
                    found.bills.append(Bill.from_json(value))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    return found


def read_jsonl(path: str | PathLike[str]) -> list[StepRecord]:
    """The step records of a file, as `read_ledger` reads it."""
    return read_ledger(path).records


class Stream:
    """Lines that reach the disk in batches: when `every` wait, when the oldest is `seconds` old, and at the end.

    A file that cannot be written ends the stream, never the engine; `error` then says why. `append` goes on after what
    the file holds, else it is replaced; OSError when it cannot be opened.
    """

    def __init__(
        self, path: str | PathLike[str], *, append: bool = True, every: int = 64, seconds: float = 1.0
    ) -> None:
        self.error = ""
        self._every, self._seconds = every, seconds
        self._waiting: list[StepRecord | Bill] = []
        self._oldest = 0.0
        self._file: TextIO | None = open(path, "a" if append else "w", encoding="utf-8")  # noqa: SIM115 - see `close`
        if self._file.tell():
            self._file.write("\n")  # should the last writer have died within a line, ours start on a fresh one

    def add(self, entry: StepRecord | Bill) -> None:
        if self._file is None:
            return
        now = time.monotonic()
        if not self._waiting:
            self._oldest = now
        self._waiting.append(entry)
        if len(self._waiting) >= self._every or now - self._oldest >= self._seconds:
            self.flush()

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._file is None or not waiting:
            return
        try:
            self._file.write("".join(to_line(entry) + "\n" for entry in waiting))
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
