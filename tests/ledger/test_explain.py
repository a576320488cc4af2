"""Explanations say the numbers, name the cause, and fit the page."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_cases import FACTS, record

from headrace.core.plan import StageTimes
from headrace.ledger.book import Ledger
from headrace.ledger.explain import WIDTH, amount_text, explain_step, group_texts, seconds_text, summarize
from headrace.ledger.record import StepRecord
from headrace.ledger.work import StepWork

PREFILL = {
    "work": StepWork(1, 512, 1, 520e6, 1e6, 1e6, 0.0, 10e9, 1e9, 1e6),
    "num_prefill_tokens": 512,
    "num_decode_tokens": 0,
}


def summary(*records: StepRecord) -> str:
    ledger = Ledger(FACTS)
    for item in records:
        ledger.add(item)
    text = summarize(ledger)
    assert all(len(line) <= WIDTH for line in text.splitlines()), text
    return text


def words(text: str) -> str:
    """The text without its layout."""
    return " ".join(text.split())


def conclusion(*records: StepRecord) -> str:
    return words(summary(*records))


def test_a_step_in_words() -> None:
    text = explain_step(record(7, preempted=("r4",)))
    assert all(len(line) <= WIDTH for line in text.splitlines())
    for part in (
        "step 7: 8 spans, 0 prefill and 8 decode tokens, 8 given out",
        "8 running, 3 waiting; 12 of 512 blocks free",
        "30.6 ms (predicted 31 ms, +1%): schedule 100 us",
        "520 MB of weights, 20 MB of KV read",
        "bound memory bandwidth: 17.9 GB/s, 90% of the machine's",
        "chose chunk size = 256 over 512, 128: decodes wait",
        "refused request 7 not admitted: needs 12 blocks, 2 free",
        "preempted r4",
    ):
        assert part in words(text), text


def test_every_cause_is_worded() -> None:
    assert "bound host: the step ran no model" in words(explain_step(record(times=StageTimes())))
    assert "bound arithmetic:" in words(explain_step(record(forward=0.06, **PREFILL)))
    assert "outside the model" in words(explain_step(record(schedule=0.1)))
    assert "dispatch or slow kernels" in words(explain_step(record(forward=0.2)))
    assert "?" in explain_step(record(total=math.nan))


def test_summary_of_decode() -> None:
    text = summary(*(record(step_id) for step_id in range(20)))
    assert text.startswith("20 steps in 612 ms: 0 prefill and 160 decode tokens run, 160 given out")
    assert "261.4 bandwidth 100%" in words(text)  # 8 tokens in 30.6 ms
    assert "stages schedule 0.3%, prepare 0.3%, forward 98.0%" in words(text)
    assert "decode 17.9 of 20.0 GB/s (90%)" in words(text)
    assert "predicted off by 1.3% in the median step" in words(text)
    assert "refused 20 x request 19 not admitted: needs 12 blocks, 4 free" in words(text)
    assert words(text).endswith(
        "decode is bound by memory bandwidth: 520 MB of weights a step at 17.9 of 20.0 GB/s; "
        "more requests at once would raise throughput."
    )


def test_conclusions() -> None:
    long = StepWork(8, 8, 8, 100e6, 500e6, 1e5, 0.0, 4e9, 1e8, 2e8)
    assert "a smaller KV format would help" in conclusion(record(work=long))
    assert "prefill is bound by arithmetic" in conclusion(record(forward=0.06, **PREFILL))
    assert "most of it in schedule" in conclusion(record(schedule=0.1))
    assert "decode is bound by the host: the model's stages take 7.4 times" in conclusion(record(forward=0.2))
    assert "mixed steps are" in conclusion(record(num_prefill_tokens=5))
    assert conclusion(record(num_decode_tokens=0)).endswith("no step ran the model, so nothing bounds it.")
    reached = conclusion(record(), record(forward=0.01))  # the second raises the roof, also for the first
    assert "raised from the measured 20 GB/s to the 53.5 GB/s that a step reached" in reached
    assert "bandwidth 50%, host 50%" in reached and not re.search(r"\b(1\d[1-9]|[2-9]\d\d)%", reached)
    assert "request r2 most often (2)" in conclusion(record(preempted=("r1", "r2")), record(preempted=("r2",)))
    assert summarize(Ledger(FACTS)) == "no steps recorded"


def test_busy_machines_are_told() -> None:
    ledger = Ledger(replace(FACTS, granted=0.5))
    ledger.add(record())
    assert "others used the machine when its rates were measured (50% of" in words(summarize(ledger))


def test_refusals_are_grouped_and_limited() -> None:
    texts = ["request a1 waits: 3 free", "request b2 waits: 4 free", "other"]
    assert group_texts(texts) == [(2, "request b2 waits: 4 free"), (1, "other")]
    many = (*(f"reason {'x' * index}" for index in range(9)), "very long " * 40)
    assert "and 5 others of 5 kinds" in summary(record(refusals=many))


def test_summary_names_the_window_and_a_lost_stream() -> None:
    device = Path("/dev/full")
    if not device.exists():
        pytest.skip("needs /dev/full")
    with Ledger(FACTS, capacity=2, stream_path=device) as ledger:
        for step_id in range(5):
            ledger.add(record(step_id))
        ledger.flush()
        text = summarize(ledger)
    assert "below: the last 2 steps" in text and "ended early: OSError" in text


def test_units() -> None:
    texts = [seconds_text(value) for value in (1.5, 0.0305, 12.3e-6, 0.0, 4000.0, math.inf)]
    assert texts == ["1.5 s", "30.5 ms", "12.3 us", "0 us", "4000 s", "?"]
    values = (540e6, 4.31e9, 0.0, 999.9e6, 12.0, 2.5e12, 1234.0, math.nan)
    assert [amount_text(value, "B") for value in values] == [
        "540 MB", "4.31 GB", "0 B", "1 GB", "12 B", "2.5 TB", "1.23 kB", "? B"
    ]  # fmt: skip
