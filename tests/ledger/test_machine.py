"""The cache of machine facts never fails; no timing is asserted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ledger_cases import FACTS, record

from headrace.core.plan import StageTimes
from headrace.ledger import machine
from headrace.ledger.book import Ledger
from headrace.ledger.machine import MachineFacts, machine_facts, machine_key
from headrace.ledger.work import StepWork


class Measure:
    """Stands in for `measure`: each call gives facts that tell which call they are from."""

    def __init__(self) -> None:
        self.calls = 0
        self.granted = 1.0

    def __call__(self, num_threads: int | None = None) -> MachineFacts:
        self.calls += 1
        return MachineFacts("fake", 1e9 * self.calls, 1e9, num_threads or 1, 0.0, granted=self.granted)


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    fake = Measure()
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(machine, "measure", fake)
    return fake


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A call forgets what this process knows."""
    monkeypatch.setattr(machine, "_known", {})
    return lambda: machine._known.clear()


def test_measured_once_and_kept(measure: Measure, new_process: Any) -> None:
    facts = machine_facts()
    assert machine_facts() == facts
    new_process()
    assert machine_facts() == facts and measure.calls == 1
    other = machine_facts(7)  # another number of threads is another machine, kept beside the first
    new_process()
    assert machine_facts(7) == other and machine_facts() == facts and measure.calls == 2
    assert machine_facts(refresh=True).read_bandwidth == 3e9
    new_process()
    assert machine_facts().read_bandwidth == 3e9 and measure.calls == 3
    assert [path.name for path in machine.cache_dir().iterdir()] == ["machine.json"]  # no temporary file stays


def stored(**changes: Any) -> str:
    entry = {"device_name": "x", "read_bandwidth": 1e9, "flops": 1e9, "num_threads": 1, "measured_at": 0.0}
    entry |= {"cache_bytes": 0, "granted": 1.0, **changes}
    return json.dumps({"format": machine.FORMAT, "machines": {machine_key(): entry}})


BAD = {
    "empty": "",
    "cut": stored()[:50],
    "no object": "[1, 2]",
    "other format": '{"format": -1, "machines": {}}',
    "machines no object": f'{{"format": {machine.FORMAT}, "machines": 3}}',
    "entry no object": json.dumps({"format": machine.FORMAT, "machines": {machine_key(): 5}}),
    "entry null": json.dumps({"format": machine.FORMAT, "machines": {machine_key(): None}}),
    "entry empty": json.dumps({"format": machine.FORMAT, "machines": {machine_key(): {}}}),
    "zero": stored(flops=0.0),
    "negative": stored(read_bandwidth=-1.0),
    "not a number": stored(read_bandwidth=math.nan),
    "infinite": stored(flops=math.inf),
    "text": stored(flops="fast"),
    "list": stored(num_threads=[]),
    "huge": stored(num_threads=math.inf),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_bad_files_are_measured_again(content: str, measure: Measure, new_process: Any) -> None:
    path = machine.cache_dir() / "machine.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    facts = machine_facts()
    assert measure.calls == 1
    new_process()
    assert machine_facts() == facts and measure.calls == 1  # the bad file was replaced


def test_binary_file_and_folder_in_its_place(measure: Measure, new_process: Any) -> None:
    path = machine.cache_dir() / "machine.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff\xfe\x00\x9f")
    assert machine_facts().read_bandwidth == 1e9
    new_process()
    path.unlink()
    path.mkdir()
    assert machine_facts().read_bandwidth == 2e9
    assert sorted(p.name for p in path.parent.iterdir()) == ["machine.json"]


def test_unwritable_folder_costs_one_measurement(
    measure: Measure, new_process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("HEADRACE_HOME", str(blocker / "below"))  # cannot be made, whoever runs the test
    assert machine_facts() == machine_facts()
    assert measure.calls == 1


def test_facts_of_a_busy_machine_are_improved(
    measure: Measure, new_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure.granted = 0.5
    machine_facts()  # measured_at = 0: long ago
    new_process()
    measure.granted = 1.0
    assert machine_facts().read_bandwidth == 2e9
    new_process()
    assert machine_facts().read_bandwidth == 2e9 and measure.calls == 2


def test_rates_that_steps_reached_are_kept(measure: Measure, new_process: Any) -> None:
    def run(num_bytes: float, flops: float, seconds: float, cache: int = 100) -> MachineFacts:
        with Ledger(replace(machine_facts(1), cache_bytes=cache)) as ledger:
            work = StepWork(1, 1, 1, num_bytes, 0.0, 0.0, 0.0, flops, 0.0, 0.0)
            ledger.add(record(forward=seconds, work=work, times=StageTimes(forward=seconds)).judged(ledger.facts))
            assert ledger.records()[0].judgement.roof_share <= 1.0
            shown = ledger.facts
        new_process()
        return shown

    assert run(1e9, 1.0, 0.5).read_bandwidth == 2e9 == machine_facts(1).read_bandwidth
    assert run(1e9, 1.0, 0.499).read_bandwidth > 2e9 == machine_facts(1).read_bandwidth  # too little to lose fits for
    assert run(1e9, 1.0, 0.1, cache=10**9).read_bandwidth == 1e10  # a cache may have held it: for this run only
    assert run(1.0, 5e9, 1.0).flops == 5e9 == machine_facts(1).flops and machine_facts(1).read_bandwidth == 2e9
    assert run(1e9, 1e9, 1e-9) == replace(machine_facts(1), cache_bytes=100) and measure.calls == 1


def test_what_other_arithmetic_reaches_raises_its_own_rates_only(measure: Measure, new_process: Any) -> None:
    usual, cheap = machine_facts(3), machine_facts(3, arithmetic="int8")
    assert measure.calls == 2 and (usual.arithmetic, cheap.arithmetic) == ("", "int8")
    machine.remember(machine.reached(cheap, 0.0, 9e9, 1.0))
    for _ in range(2):
        assert machine_facts(3) == usual and machine_facts(3, arithmetic="int8").flops == 9e9 and measure.calls == 2
        new_process()


def test_a_better_old_rate_stays() -> None:
    slow = MachineFacts("x", 1.0, 500e9, 2, 1.0)
    assert machine._better(slow, None) == slow
    best = machine._better(slow, FACTS)
    assert (best.read_bandwidth, best.flops, best.measured_at) == (20e9, 500e9, 1.0)


def test_facts_are_checked() -> None:
    assert FACTS.crossing == 10.0
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="read_bandwidth"):
            MachineFacts("x", bad, 1.0, 1, 0.0)


def test_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/somewhere")
    assert machine.cache_dir() == Path("/somewhere/.cache/headrace")


def test_measuring_gives_sensible_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_MIB", 1 << 14)  # small arrays: only that it runs is of interest
    bandwidth = machine.measure_read_bandwidth(2, 0, budget=0.0)
    assert math.isfinite(bandwidth) and bandwidth > 0
    assert machine.measure_flops(budget=0.0, size=64) > 0
    assert machine.cpu_name() and machine.available_threads() >= 1 and machine.last_level_cache() >= 0
