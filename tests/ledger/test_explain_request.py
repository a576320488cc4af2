"""Bills, misses and preemptions in words; the `explain` command over a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ledger_cases import FACTS, record

from headrace.cli.main import main
from headrace.core.plan_builder import PrefixUse
from headrace.core.prefix import Miss
from headrace.ledger.bill import ITEMS, Bill
from headrace.ledger.book import Ledger
from headrace.ledger.explain import WIDTH, explain_step, summarize
from headrace.ledger.explain_request import (
    advice,
    explain_bill,
    explain_misses,
    explain_preemptions,
    facts_of,
    find_bill,
)
from headrace.ledger.jsonl import read_jsonl, read_ledger

MS = 1_000_000
MISS = Miss(32, "no known prompt goes on like this: the first other token is at 32")
USES = (PrefixUse("r1", 100, 32, MISS), PrefixUse("r2/0", 64, 48, None))


def bill(largest: str, **changes: object) -> Bill:
    items = {name: 10 * MS if name == largest else MS for name in ITEMS}
    values = {"request_id": "r1", "started_at": 1.0, "finish_reason": "stop", "wall": 16 * MS, "first_token": 3 * MS}
    counts = {"prompt_tokens": 100, "cached_tokens": 32, "output_tokens": 7, "steps": 9}
    return Bill(**{**values, **counts, **items, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("largest", "refusals", "words"),
    [
        ("queued", ("request r1 not admitted: all rows are taken (max_num_seqs)",), "larger max_num_seqs"),
        ("queued", ("request r1 not admitted: needs 12 blocks, 3 free",), "needs 12 blocks, 3 free.*larger kv_cache"),
        ("queued", ("request r10 not admitted: needs 12 blocks, 3 free",), "earlier steps"),
        ("queued", (), "earlier steps"),
        ("prefill", (), "32 of 100 prompt tokens.*first other token is at 32"),
        ("decode", (), "fewer output tokens"),
        ("waiting", (), "lower max_num_seqs"),
        ("held_back", (), "max_num_batched_tokens"),
        ("preempted", (), "larger kv_cache"),
        ("between", (), "between steps"),
    ],
)
def test_advice_names_the_cause(largest: str, refusals: tuple[str, ...], words: str) -> None:
    text = advice(bill(largest), [record(0, refusals=refusals, prefixes=USES)])
    assert text.startswith("62% of its time") and text.count(".") == 1
    assert re.search(words, text), text


def test_a_bill_is_a_table_whose_shares_sum() -> None:
    text = explain_bill(bill("decode", preemptions=2, recomputed_tokens=40))
    lines = text.splitlines()
    assert lines[0] == "request r1: 16 ms, first token after 3 ms; ended by stop"
    flat = " ".join(text.split())
    assert "40 run again after 2 preemptions" in flat and "32 of them found" in flat
    shares = [float(line.split("%")[0].split()[-1]) for line in lines if "%   " in line]
    assert len(shares) == len(ITEMS) and sum(shares) == pytest.approx(100, abs=0.4)
    assert all(len(line) <= WIDTH for line in lines)
    nothing = explain_bill(Bill(request_id="r", started_at=0.0))
    assert "still running" in nothing and "took no time" in nothing


def test_misses_and_steps_say_what_was_found() -> None:
    text = explain_misses([record(3, prefixes=USES)])
    assert text.startswith("prefix cache: 80 of 164 prompt tokens found (48.8%), 2 requests")
    assert "1 x another token, 1 x found" in text and "request r1 (step 3): 32 of 100; no known prompt" in text
    for reason, kind in (
        ("the block at token 16 was evicted, 3 evictions ago; a larger kv_cache keeps it", "1 x evicted"),
        ("nothing is known in this namespace (salt, adapter)", "nothing known in its namespace"),
        ("what is known of this prefix ends at token 16", "more than what is known"),
    ):
        assert kind in explain_misses([record(prefixes=(PrefixUse("a", 9, 0, Miss(0, reason)),))])
    assert "no request was admitted" in explain_misses([record()])
    assert "request r2/0: 48 of 64 tokens found" in explain_step(record(prefixes=USES))
    many = [record(n, prefixes=(PrefixUse(f"r{n}", 9, 0, None),)) for n in range(100)]
    assert "and 60 more" in explain_misses(many)


def test_preemptions() -> None:
    text = explain_preemptions(
        [record(4, preempted=("r1", "r2")), record(5, preempted=("r1",))],
        [bill("preempted", preemptions=2, recomputed_tokens=40)],
    )
    assert text.startswith("3 preemptions of 2 requests")
    assert "40 tokens run again, 10 ms off the table" in text and "step 5: request r1" in text
    assert explain_preemptions([record()]) == "nobody was preempted"


def test_rates_come_back_from_the_records() -> None:
    facts = facts_of([record()])
    assert facts.read_bandwidth == pytest.approx(FACTS.read_bandwidth) and facts.flops == pytest.approx(FACTS.flops)
    assert facts_of([]).flops == 1.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(FACTS)
    ledger.stream_to(path)
    ledger.add(record(0, prefixes=USES))
    ledger.add_bill(bill("decode"))
    ledger.add(record(1, preempted=("r1",)))
    ledger.add_bill(bill("waiting", request_id="r2/0"))
    ledger.add_bill(bill("waiting", request_id="r2/1", started_at=2.0))
    ledger.close()
    return path


def test_files_hold_steps_and_requests(path: Path) -> None:
    found = read_ledger(path)
    assert [entry.step_id for entry in found.records] == [0, 1] and found.records[0].prefixes == USES
    assert [entry.request_id for entry in found.bills] == ["r1", "r2/0", "r2/1"]
    assert found.bills[0] == bill("decode") and read_jsonl(path) == found.records
    assert find_bill(found.bills, "r2").output_tokens == 14
    with path.open("a") as file:
        file.write('{"kind": "weather", "rain": true}\n{"kind": "request", "request_id": "torn')
    assert read_ledger(path) == found
    ledger = Ledger(FACTS)
    for entry in found.records:
        ledger.add(entry)
    for each in found.bills:
        ledger.add_bill(each)
    assert ledger.write_jsonl(path) == 5 and read_ledger(path) == found
    assert ledger.totals.hit_rate == pytest.approx(80 / 164) and ledger.totals.requests == 3


def test_files_of_older_versions_are_read(tmp_path: Path) -> None:
    value = record().to_json()
    del value["prefixes"]
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps(value) + "\n")
    assert read_jsonl(path) == [record()]
    path.write_text('{"kind": "request", "request_id": 3}\n')
    with pytest.raises(ValueError, match="line 1: not a bill"):
        read_ledger(path)


def test_bills_are_bounded() -> None:
    ledger = Ledger(FACTS, capacity=3)
    for index in range(9):
        ledger.add_bill(bill("decode", request_id=f"r{index % 7}"))
    assert [each.request_id for each in ledger.bills()] == ["r6", "r0", "r1"]
    assert ledger.bill("r0") is not None and ledger.bill("r5") is None and ledger.totals.requests == 9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["2 steps in", "80 of 164 prompt tokens found", "3 ended, 16 ms in the median", "of 20.0 GB/s"]),
        (["--step", "1"], ["step 1: 8 spans", "preempted r1"]),
        (["--request", "r1"], ["request r1: 16 ms", "faster"]),
        (["--request", "r2"], ["request r2: 1.02 s"]),
        (["--misses", "--preemptions"], ["prefix cache: 80 of 164", "1 preemption of 1 request"]),
    ],
)
def test_the_command(path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: list[str]) -> None:
    assert main(["explain", str(path), *options]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in words), out


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--step", "7"], "steps 0 to 1"), (["--request", "x"], "there are bills of r1, r2/0")],
)
def test_what_is_not_there(path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert main(["explain", str(path), *options]) == 2
    assert words in capsys.readouterr().err
    assert main(["explain", str(path.parent / "none")]) == 2
    path.write_text("")
    assert main(["explain", str(path)]) == 2


def test_the_summary_tells_of_requests() -> None:
    ledger = Ledger(FACTS)
    ledger.add(record(0, prefixes=USES))
    ledger.add_bill(bill("decode"))
    text = summarize(ledger)
    assert "requests  1 ended" in text and "decode 62.5%" in text and "prefixes" in text
