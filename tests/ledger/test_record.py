"""Judgement, ring, totals, and the way to JSON and back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ledger_cases import FACTS, record, spans

from headrace.core.plan import StageTimes, StepPlan
from headrace.ledger.book import Ledger, NullLedger
from headrace.ledger.jsonl import read_jsonl, to_line
from headrace.ledger.record import StepRecord, judge, split_tokens
from headrace.ledger.work import StepWork

# FACTS: 20 GB/s and 200 GFLOP/s, so 200 MB and 2 GFLOP take 10 ms each
MEMORY = StepWork(1, 1, 1, bytes_weights=200e6, flops_linear=0.2e9)
ARITHMETIC = StepWork(1, 512, 1, bytes_weights=20e6, flops_linear=2e9)


def times(forward: float, logits: float = 0.0, **others: float) -> StageTimes:
    return StageTimes(forward=forward, logits=logits, **others)


@pytest.mark.parametrize(
    ("work", "stages", "outside", "total", "bound"),
    [
        (MEMORY, times(0.012), 0.001, 0.0, "bandwidth"),
        (MEMORY, times(0.010, 0.009), 0.001, 0.0, "bandwidth"),  # 53 % of the roof
        (MEMORY, times(0.010, 0.011), 0.001, 0.0, "host"),  # 48 %: something else takes the time
        (ARITHMETIC, times(0.012), 0.001, 0.0, "compute"),
        (ARITHMETIC, times(0.030), 0.001, 0.0, "host"),
        (MEMORY, times(0.012), 0.013, 0.0, "host"),  # schedule and commit outweigh the model
        (MEMORY, times(0.012, prepare=0.007, sample=0.006), 0.0, 0.0, "host"),
        (MEMORY, times(0.012), 0.001, 0.025, "host"),  # time that no stage accounts for
        (MEMORY, times(0.012), 0.001, 0.020, "bandwidth"),
        (MEMORY, times(0.005), 0.001, 0.0, "bandwidth"),  # faster than the roof: a cache held the weights
        (StepWork(), times(0.0), 0.001, 0.0, "host"),
        (StepWork(), times(0.0), 0.0, 0.0, "host"),
    ],
)
def test_judgement(work: StepWork, stages: StageTimes, outside: float, total: float, bound: str) -> None:
    assert judge(FACTS, work, stages, outside, total).bound == bound


def test_shares() -> None:
    verdict = judge(FACTS, MEMORY, times(0.015, 0.005), 0.001)
    assert verdict.bandwidth_share == pytest.approx(0.5) and verdict.compute_share == pytest.approx(0.05)
    assert verdict.roof_share == pytest.approx(0.5)
    assert verdict.device_seconds == pytest.approx(0.020) and verdict.outside_seconds == pytest.approx(0.001)
    assert judge(FACTS, StepWork(), times(0.0), 0.0).roof_share == 0.0


def test_split_tokens() -> None:
    columns = spans((0, 16), (16, 5), (30, 1), (40, 4), (0, 1))
    columns[3] = (0, 0, 0, 3, 0)
    yields = np.array([False, True, True, True, False])
    assert split_tokens(StepPlan(step_id=0, spans=columns, yields=yields)) == (16 + 5 + 1, 1 + 4)
    assert split_tokens(StepPlan(step_id=0)) == (0, 0)


def test_ring_keeps_the_latest_and_totals_keep_all() -> None:
    ledger = Ledger(FACTS, capacity=4)
    for step_id in range(10):
        slow = step_id % 2 == 1
        ledger.add(record(step_id, forward=0.2 if slow else 0.03, preempted=("r1", "r2") if step_id == 3 else ()))
    assert [kept.step_id for kept in ledger.records()] == [6, 7, 8, 9] and len(ledger) == 4
    assert [kept.step_id for kept in ledger.records(2)] == [8, 9] and ledger.records(0) == []
    totals = ledger.totals
    assert (totals.steps, totals.decode_tokens, totals.prefill_tokens, totals.output_tokens) == (10, 80, 0, 80)
    assert totals.preemptions == 2 and totals.refusals == 10
    assert totals.steps_by_bound == {"bandwidth": 5, "compute": 0, "host": 5}
    assert totals.seconds_by_bound["host"] == pytest.approx(5 * 0.2006)
    assert totals.seconds == pytest.approx(sum(totals.seconds_by_bound.values()))
    with pytest.raises(ValueError, match="capacity"):
        Ledger(FACTS, capacity=0)


def test_a_step_is_opened_filled_and_finished() -> None:
    ledger = Ledger(FACTS)
    first, second = ledger.begin(0), ledger.begin(1)  # two in flight
    first.decide("drafts per row", "0", ("2", "4"), "acceptance is low")
    first.refuse("request 9 not admitted: needs 4 blocks, 1 free")
    first.preempted.append("r5")
    first.work, first.times, first.schedule, first.commit = MEMORY, times(0.012), 0.001, 0.002
    ledger.finish(first)
    second.total = 0.5
    ledger.finish(second)
    kept, other = ledger.records()
    assert kept.bound == "bandwidth" and kept.total == pytest.approx(0.015) and kept.preempted == ("r5",)
    assert kept.decisions[0].alternatives == ("2", "4") and len(kept.refusals) == 1
    assert other.total == 0.5 and other.other == 0.5 and other.refusals == () and other.bound == "host"


def test_stages_sum_to_the_total() -> None:
    kept = record(total=0.05)
    assert sum(kept.stages()) == pytest.approx(0.05)


def test_jsonl_round_trip(tmp_path: Path) -> None:
    ledger = Ledger(FACTS)
    for step_id in range(5):
        ledger.add(record(step_id, preempted=("räu\nber",)))
    path = tmp_path / "steps.jsonl"
    assert ledger.write_jsonl(path) == 5
    assert read_jsonl(path) == ledger.records()
    assert ledger.write_jsonl(path) == 5 and len(read_jsonl(path)) == 5  # replaced, not appended to
    first = json.loads(path.read_text().splitlines()[0])
    assert first["bound"] == "bandwidth" and first["work"]["bytes_weights"] == 520e6


def test_numbers_that_json_cannot_hold() -> None:
    odd = record(predicted=math.nan, total=math.inf, num_waiting=np.int64(3), commit=np.float64(0.5))
    line = to_line(odd)
    value = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} was written"))
    assert value["predicted"] is None and value["total"] is None and value["num_waiting"] == 3
    back = StepRecord.from_json(value)
    assert math.isnan(back.predicted) and replace(back, predicted=0.0, total=0.0) == replace(
        odd, predicted=0.0, total=0.0
    )


def test_stream_while_running(tmp_path: Path) -> None:
    path = tmp_path / "stream.jsonl"
    with Ledger(FACTS, capacity=2, stream_path=path) as ledger:
        for step_id in range(5):
            ledger.add(record(step_id))
        ledger.flush()
        assert [kept.step_id for kept in read_jsonl(path)] == [0, 1, 2, 3, 4]
        ledger.add(record(5))
    ledger.close()  # again: nothing happens
    ledger.add(record(6))  # after the end the ring goes on, the file does not
    assert len(read_jsonl(path)) == 6 and ledger.records()[-1].step_id == 6
    with path.open("a") as file:
        file.write(to_line(record(7))[:100])  # the process died here
    with Ledger(FACTS, stream_path=path) as ledger:  # and the next one goes on in the same file
        ledger.add(record(8))
    assert [kept.step_id for kept in read_jsonl(path)] == [0, 1, 2, 3, 4, 5, 8]


def test_a_full_disk_ends_the_stream_only(tmp_path: Path) -> None:
    device = Path("/dev/full")
    if not device.exists():
        pytest.skip("needs /dev/full")
    with Ledger(FACTS, stream_path=device) as ledger:
        ledger.add(record(0))
        ledger.flush()
        assert "OSError" in ledger.stream_error
        ledger.add(record(1))
    assert len(ledger) == 2
    with pytest.raises(OSError):
        Ledger(FACTS, stream_path=tmp_path / "missing" / "x.jsonl")


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    for bad in ("{}", "3", json.dumps({**json.loads(to_line(record())), "total": "long"})):
        path.write_text(to_line(record()) + "\n" + bad + "\n")
        with pytest.raises(ValueError, match="line 2"):
            read_jsonl(path)


def test_null_ledger_keeps_nothing() -> None:
    ledger = NullLedger()
    step = ledger.begin(0)
    step.refuse("nothing")
    ledger.finish(step)
    ledger.add(record())
    ledger.flush()
    ledger.close()
    assert not ledger.enabled and len(ledger) == 0 and ledger.totals.steps == 0 and ledger.records() == []
