"""A head's step behind a verification: the kernels fill in what a host that knew the tokens would have sent."""

import numpy as np
import torch

from headrace.ops.triton.follow import Verified, follow, follow_tokens, hand_over
from headrace.ops.triton.step import COMPUTED, KNOWN, SHIFT, Lines, StepSpans, TableView

MOST, ROWS, COUNT = 4, 80, 70  # drafts of a span, rows of the tables, spans: more than are summed up at once


def test_entries_of_what_was_accepted(device):
    random = np.random.default_rng(0)

    def there(values):
        return torch.from_numpy(np.asarray(values, np.int32)).to(device)

    rows = random.permutation(ROWS)[:COUNT]
    drafts = random.integers(0, MOST + 1, COUNT)
    brought = 1 + np.minimum(random.integers(0, MOST + 1, COUNT), drafts)
    tokens = random.integers(5, 99, (ROWS, 1 + MOST))
    drawn = tokens.copy()
    drawn[np.arange(COUNT), np.minimum(brought, MOST)] = np.where(brought <= drafts, -1, tokens[np.arange(COUNT), MOST])
    drawn[3, 0], brought[3], tokens[3, 0] = -2, 1, 0  # nothing could be drawn there
    base, fed = random.integers(0, 9, COUNT), random.integers(1, 20, COUNT)
    starts = np.concatenate([[0], np.cumsum(1 + drafts)])

    model, own = (TableView.create(ROWS, 64, 16, 1, device) for _ in range(2))
    model.records()[rows, COMPUTED] = there(base + fed + brought)
    model.records()[rows, KNOWN] = there(base + fed + brought + 1)
    own.records()[rows, SHIFT] = there(base + 1)
    features = torch.zeros((int(starts[-1]), 1), device=device)
    source = Verified(model, there(starts), there(drafts), there(drawn), features)
    empty = there(np.full(len(features) + ROWS, -7))
    padded = there(np.concatenate([rows, np.zeros(ROWS - COUNT, int)]))
    spans = StepSpans(padded, empty[: ROWS + 1].clone(), there([COUNT]), empty, empty, empty, empty[None])
    lines, index = Lines(empty.clone(), empty[:ROWS].clone()), empty.clone()
    spans.query_start[0] = 0
    follow(source, own, spans, lines, index)

    ends = np.cumsum(brought)
    assert spans.query_start[: COUNT + 1].tolist() == [0, *ends.tolist()]
    assert lines.line_of[:COUNT].tolist() == (ends - 1).tolist() and lines.line_of[COUNT] == -7
    assert lines.span_of[: ends[-1]].tolist() == np.repeat(np.arange(COUNT), brought).tolist()
    assert index[: ends[-1]].tolist() == [starts[s] + j for s in range(COUNT) for j in range(brought[s])]
    assert own.records()[rows, COMPUTED].tolist() == fed.tolist()
    assert own.records()[rows, KNOWN].tolist() == (fed + brought).tolist()
    for span, row in enumerate(rows.tolist()):
        entries = own.tokens()[row, fed[span] : fed[span] + brought[span] + 1].tolist()
        assert entries == [*tokens[span, : brought[span]].tolist(), 0]

    made = random.integers(5, 99, (3, ROWS))
    made[1, 2] = -2
    model.records()[rows[0], KNOWN] = 62  # the row's end is near
    hand_over(source, spans, there(made))
    for span, row in enumerate(rows.tolist()):
        known = int(model.records()[row, KNOWN])
        want = np.maximum(made[:, span], 0).tolist()[: 64 - known]
        assert model.tokens()[row, known : known + 3].tolist() == want
    assert int((model.tokens() != 0).sum()) == 3 * COUNT - 2, "nothing else was written"


def test_a_draft_model_goes_on_from_the_last_two_tokens(device):
    random = np.random.default_rng(1)

    def there(values):
        return torch.from_numpy(np.asarray(values, np.int32)).to(device)

    rows = random.permutation(ROWS)[:COUNT]
    drafts, known = random.integers(0, MOST + 1, COUNT), random.integers(2, 60, COUNT)
    model, own = (TableView.create(ROWS, 64, 16, 1, device) for _ in range(2))
    model.tokens().copy_(there(random.integers(5, 99, (ROWS, 64))))
    model.records()[rows, KNOWN] = there(known)
    model.records()[rows, COMPUTED] = there(known - 1)
    empty = there(np.zeros(ROWS + 1))
    source = Verified(model, empty, there(drafts), there(np.zeros((ROWS, 1 + MOST))), None)
    padded = there(np.concatenate([rows, np.zeros(ROWS - COUNT, int)]))
    spans = StepSpans(padded, empty, there([COUNT]), empty, empty, empty, empty[None])
    follow_tokens(source, own, spans)

    assert own.records()[rows, KNOWN].tolist() == known.tolist()
    assert own.records()[rows, COMPUTED].tolist() == (known - 2).tolist()
    for row, count, end in zip(rows.tolist(), drafts.tolist(), known.tolist(), strict=True):
        first = max(end - 1 - count, 0)
        assert own.tokens()[row, first:end].tolist() == model.tokens()[row, first:end].tolist()
        own.tokens()[row, first:end] = 0
    assert not own.tokens().any() and not own.records()[np.setdiff1d(np.arange(ROWS), rows)].any()
