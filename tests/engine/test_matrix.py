"""Every pair of features gives what the decoding gives alone, or is refused; docs/matrix.md says the same."""

import matrix


def test_every_pair_holds_or_is_refused_and_the_document_is_true():
    outcomes = matrix.run()
    assert [pair for pair, outcome in outcomes.items() if outcome == "FAILS"] == []
    assert matrix.DOCUMENT.read_text(encoding="utf-8") == matrix.document(outcomes), "run python tests/matrix.py"
