"""HostBound: several runs of a decode step for one visit of the host, where the host is what steps wait for.

A small model's step may take a GPU less time than the host needs to plan the next one, to take in what came of it and
to tell the requests. Then the GPU stands idle, unless it is told to run the step several times at once: what the host
does for a step as a whole is done once for all its runs. The price is paid by requests that end within a visit, whose
last runs are in vain, and by those that arrive during it; so a visit is kept short.

No prediction decides. The host is what bounds a load where it hardly waits for its steps: then the runs are doubled,
and halved again where that brought little. Where it waits for most of the time, half as many runs would hide it too.

Where drafts may go on from its tokens, a step is looked at before the next one is sent: the GPU stands still from when
it ends until that one comes. How long is measured; so many runs are made at once that it is a small part of a visit.
"""

from __future__ import annotations

import math

from headrace.core.visits import MOST_RUNS

_WINDOW = 16  # visits that are looked at together
_BOUND = 0.1  # the host waits for less of the time than this: it is what bounds the steps
_SLACK = 0.55  # it waits for more: half the runs would do
_WORTH = 1.03  # what twice the runs must bring
_MOST_SECONDS = 0.01  # of a visit
_MEMORY = 64  # windows after which more runs that brought little are tried again
_STILL = 0.08  # of a visit that is looked at before the next: at most this part of the GPU's time is lost between them
_KEPT = 0.9  # weight of the past in what is measured of such visits


class _Load:
    """What is known of steps of some number of rows."""

    def __init__(self) -> None:
        self.runs = 1
        self.rates: dict[int, tuple[float, int]] = {}  # runs -> runs a second, and in which window they were measured
        self.windows = 0
        self.told: list[tuple[str, ...]] = []  # of the number of runs, to the ledger
        self.begin()

    def begin(self) -> None:
        self.visits, self.seconds, self.waited = 0, 0.0, 0.0


class _Serial:
    """What is known of steps of some number of rows that are looked at before the next one is sent."""

    def __init__(self) -> None:
        self.still, self.run = 0.0, 0.0  # seconds that the GPU stands still before a visit; of a run, drafting included
        self.seen = 0
        self.runs = 1

    def observe(self, num_runs: int, seconds: float, busy: float) -> None:
        self.seen += 1
        kept = min(_KEPT, 1.0 - 1.0 / self.seen)
        still, run = max(0.0, seconds - busy), busy / num_runs
        if self.seen > 1:  # a pause of the machine moves little
            still, run = min(still, 4 * self.still + 1e-4), min(run, 4 * self.run + 1e-4)
        self.still += (1 - kept) * (still - self.still)
        self.run += (1 - kept) * (run - self.run)
        if self.run > 0 and (1 < self.seen < _WINDOW or self.seen % _WINDOW == 0):
            few = math.ceil((1 - _STILL) * self.still / (_STILL * self.run))
            self.runs = max(1, min(few, int(_MOST_SECONDS / self.run), MOST_RUNS))

    def told(self) -> tuple[str, ...]:
        reason = f"the GPU stands still {self.still * 1e6:.0f} us before a visit, a run takes {self.run * 1e6:.0f}"
        return "runs a visit", str(self.runs), reason, "1"


class HostBound:
    """A `Visits` (core/visits.py)."""

    def __init__(self, follows: bool = False) -> None:
        """`follows`: drafts can be made between two runs of a step that verifies."""
        self.follows = follows
        self._loads: dict[int, _Load] = {}  # rows, rounded -> what is known
        self._serial: dict[int, _Serial] = {}  # the same of those that are looked at before the next one is sent
        self._told: list[tuple[str, ...]] = []

    def runs(self, num_rows: int, serial: bool = False) -> int:
        if serial:
            known = self._serial.get(num_rows.bit_length())
            runs = 1 if known is None else known.runs
            self._told = [known.told()] if known is not None and runs > 1 else []
            return runs
        load = self._loads.get(num_rows.bit_length())
        if load is None:
            self._told = []
            return 1
        self._told = load.told
        return load.runs

    def decisions(self) -> list[tuple[str, ...]]:
        return self._told

    def observe(self, num_rows: int, num_runs: int, seconds: float, waited: float, serial: bool = False) -> None:
        if serial:
            self._serial.setdefault(num_rows.bit_length(), _Serial()).observe(num_runs, seconds, waited)
            return
        load = self._loads.setdefault(num_rows.bit_length(), _Load())
        if num_runs != load.runs:  # planned before the number changed
            return
        load.visits += 1
        load.seconds += seconds
        load.waited += waited
        if load.visits == _WINDOW:
            self._learn(load)
            load.begin()

    def _learn(self, load: _Load) -> None:
        """A window is over."""
        runs, share = load.runs, load.waited / load.seconds
        rate = runs * load.visits / load.seconds
        load.windows += 1
        load.rates[runs] = rate, load.windows
        fewer, when = load.rates.get(runs // 2, (0.0, 0))
        if runs > 1 and load.windows - when < _MEMORY and rate < _WORTH * fewer:
            load.runs = runs // 2
        elif share < _BOUND:
            more, when = load.rates.get(2 * runs, (0.0, -_MEMORY))
            known = load.windows - when < _MEMORY
            short = 2 * load.seconds / load.visits <= _MOST_SECONDS
            if 2 * runs <= MOST_RUNS and short and (not known or more >= _WORTH * rate):
                load.runs = 2 * runs
        elif share > _SLACK and runs > 1:
            load.runs = runs // 2
        rates = ", ".join(f"{runs}: {rate:.0f} steps/s" for runs, (rate, _) in sorted(load.rates.items()))
        told = ("runs a visit", str(load.runs), f"the host is what such steps wait for ({rates})", "1")
        load.told = [told] if load.runs > 1 else []
