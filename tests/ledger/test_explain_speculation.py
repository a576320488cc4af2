"""What the ledger says of speculation."""

from dataclasses import replace

import pytest
from ledger_cases import record

from headrace.core.drafting import break_even
from headrace.core.plan import StageTimes
from headrace.ledger.book import Totals
from headrace.ledger.explain_speculation import explain_speculation
from headrace.ledger.record import DraftUse, StepRecord


def step(drafts, accepted, seconds, drafting=0.0):
    times = StageTimes(forward=seconds, draft=drafting)
    uses = (DraftUse("draft", 1, drafts, accepted),) if drafts else ()
    return replace(
        record(times=times), num_spans=1, num_decode_tokens=1 + drafts, total=seconds + drafting, drafts=uses
    )


def test_break_even_comes_of_measured_times():
    records = [step(0, 0, 0.030)] * 4 + [step(3, 2, 0.045, 0.015)] * 5 + [step(3, 0, 0.045, 0.015)] * 5
    text = explain_speculation(records)
    assert "10 of 14 steps verified drafts" in text
    assert "10 of 30 drafts right (33%)" in text and "2.00 tokens each" in text
    assert "a step without drafts takes 30 ms" in text
    (line,) = [line.split() for line in text.splitlines() if line.startswith("    3.0")]
    assert line == ["3.0", "10", "45", "ms", "15", "ms", "2.00x", f"{break_even(3, 2.0):.2f}", "1.48x"]
    assert break_even(3, 2.0) == pytest.approx(0.54, abs=0.01)


def test_without_drafts_or_without_steps_to_compare():
    assert "no step verified drafts" in explain_speculation([record()])
    assert "no step without drafts was recorded" in explain_speculation([step(3, 2, 0.04)] * 5)


def test_records_with_drafts_survive_a_file():
    kept = step(3, 2, 0.04, 0.01)
    assert StepRecord.from_json(kept.to_json()) == kept
    older = kept.to_json()
    del older["drafts"], older["times"]["draft"]
    read = StepRecord.from_json(older)
    assert read.drafts == () and read.times.draft == 0.0


def test_totals_by_proposer_and_position():
    totals = Totals()
    totals.add_drafts([("ngram", 3, 1), ("draft", 2, 2)], verify_seconds=0.5)
    totals.add_drafts([("ngram", 1, 0)], verify_seconds=0.1)
    assert totals.drafts == {"ngram": [4, 1], "draft": [2, 2]}
    assert totals.draft_positions == [[3, 2], [2, 1], [1, 0]]
    assert (totals.draft_tokens, totals.accepted_draft_tokens) == (6, 3)
    assert totals.verify_seconds == pytest.approx(0.6) and totals.wasted_seconds == pytest.approx(0.5 * 0.4 + 0.1)
