"""Every option of the distribution, alone and in any combination, against the slow reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Row, Spy, drawn, reference_scores, sample

from headrace import ops
from headrace.sampling.params import BadWords, SamplingParams
from headrace.sampling.sampler import NONE_ALLOWED
from headrace.sampling.stages import Penalties, default_stages
from headrace.sampling.state import SamplingBatch, SamplingTable

GREEDY = SamplingParams(temperature=0)


def scores(rows, wrap=lambda array: array):
    spy = Spy()
    sample(rows, wrap=wrap, stages=[*default_stages(), spy])
    return spy.seen


def greedy(**options):
    return SamplingParams(temperature=0, **options)


def test_penalties_by_the_book():
    # field case P06: repetition first, over prompt and output; the others over the output
    params = greedy(repetition_penalty=1.5, frequency_penalty=0.25, presence_penalty=0.5)
    row = Row([2, -1, 0.5, 3], params, prompt=[0, 1], output=[3, 3])
    np.testing.assert_allclose(scores([row])[0], [1.333333, -1.5, 0.5, 1.0], rtol=1e-6)
    torch = pytest.importorskip("torch")
    np.testing.assert_allclose(scores([row], torch.asarray)[0], [1.333333, -1.5, 0.5, 1.0], rtol=1e-6)


def test_presence_and_frequency_do_not_look_at_the_prompt():
    row = Row([2, -1, 0.5, 3], greedy(presence_penalty=2, frequency_penalty=2), prompt=[0, 3, 3])
    assert scores([row])[0].tolist() == [2, -1, 0.5, 3]


def test_penalties_advance_along_drafts():
    logits = np.tile(np.float32([1, 1, 1]), (3, 1))
    row = Row(logits, greedy(frequency_penalty=1.0), output=[0], drafts=[0, 2])
    assert scores([row]).tolist() == [[0, 1, 1], [-1, 1, 1], [-1, 1, 0]]


def test_a_bias_excludes_and_forces_and_leaves_the_neighbour_alone():
    # field case P09
    logits = [1.0, 5.0, 2.0]
    rows = [Row(logits, greedy(logit_bias=bias)) for bias in ({1: -100}, {0: 100}, {})]
    assert drawn(rows) == [[2], [0], [1]]


def test_a_bias_does_not_bring_back_a_banned_token():
    rows = [
        Row([0.0, 1.0, 2.0], greedy(logit_bias={2: 100}, allowed_token_ids=(0, 1))),
        Row([0.0, 1.0, 2.0], greedy(logit_bias={2: 100}, min_tokens=1), stop_ids=frozenset({2})),
    ]
    assert drawn(rows) == [[1], [1]]


def test_allowed_tokens_alone_are_drawn():
    rows = [Row(np.zeros(9), SamplingParams(allowed_token_ids=(2, 5, 8)), seed=seed) for seed in range(200)]
    assert {tokens[0] for tokens in drawn(rows)} == {2, 5, 8}


SPELLINGS = {b"x": [0], b"Lon": [1], b"don": [2], b"London": [3], b" London": [4], b" Lon": [5], b"d": [6], b"on": [7]}


def test_bad_words_are_never_written_whatever_the_cut():
    # field case P14, over a model that wants nothing else
    pieces = {id: text for text, ids in SPELLINGS.items() for id in ids}
    words = BadWords.compile(["London"], SPELLINGS)
    for seed in range(60):
        output: list[int] = []
        while len(output) < 12:
            row = Row(np.zeros(8), SamplingParams(), output=output, seed=seed, bad_words=words)
            output = output + drawn([row])[0]
        assert b"London" not in b"".join(pieces[token] for token in output)


def test_bad_words_begin_in_the_output_and_follow_drafts():
    words = BadWords.compile(["London"], SPELLINGS)
    logits = np.zeros((3, 8), np.float32)
    logits[:, 2] = 1.0
    free = Row(logits[:1], GREEDY, prompt=[1], bad_words=words)  # "Lon" is the prompt's
    caught = Row(logits[:1], GREEDY, output=[1], bad_words=words)
    drafted = Row(logits, GREEDY, drafts=[5, 6], bad_words=words)
    assert drawn([free, caught]) == [[2], [0]]
    seen = scores([drafted])
    assert np.isinf(seen[:, 2]).tolist() == [False, True, False]  # nothing, " Lon", " Lon" "d"
    assert np.isinf(seen[:, 7]).tolist() == [False, False, True]


def test_a_contradiction_that_shows_only_later_ends_the_request_there():
    words = BadWords.compile(["London"], SPELLINGS)
    params = SamplingParams(allowed_token_ids=(2,))
    fine = Row(np.zeros(8), params, bad_words=words)
    stuck = Row(np.zeros(8), params, output=[1], bad_words=words)
    result = sample([fine, stuck])
    assert result.errors == {1: NONE_ALLOWED} and result.counts.tolist() == [1, 0]


def test_settings_of_a_row_go_with_its_request():
    from headrace.core.plan import Admit

    table = SamplingTable(1)
    heavy = SamplingParams(
        repetition_penalty=2.0, logit_bias={0: 5.0}, allowed_token_ids=(1,), min_tokens=3, logprobs=4, prompt_logprobs=2
    )
    words = BadWords.compile(["London"], SPELLINGS)
    tokens = np.zeros((1, 8), np.int32)
    batch = SamplingBatch(table, np.zeros(1, np.int32), np.ones(1, np.int32), tokens)
    table.set(Admit(0, "a", [0], 1, 0, heavy, 0, 0, frozenset({0}), words))
    assert sum(stage.active(batch) for stage in default_stages()) == 6
    table.set(Admit(0, "b", [0], 1, 0, GREEDY, 0, 0, frozenset({0})))
    assert not any(stage.active(batch) for stage in default_stages())
    assert table.logprobs[0] == table.prompt_logprobs[0] == -1


# -- all together

VOCAB = 8
words_lists = st.sampled_from([None, ["London"], ["x", "don"], ["Lond", "on"]])


@st.composite
def rows(draw):
    params = SamplingParams(
        temperature=draw(st.sampled_from([0, 0.5, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 0, 3])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.6])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.15])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.6, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, -1.1, 0.9])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.4, 0.7])),
        logit_bias=draw(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5, width=32), max_size=3)),
        allowed_token_ids=draw(st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1).map(tuple)),
        min_tokens=draw(st.sampled_from([0, 2])),
        logprobs=draw(st.sampled_from([None, 0, 3])),
    )
    words = draw(words_lists)
    tokens = st.lists(st.integers(0, VOCAB - 1), max_size=4)
    drafts = draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))
    seed = draw(st.integers(0, 2**31))
    return Row(
        np.random.default_rng(seed).standard_normal((1 + len(drafts), VOCAB)) * 2,
        params,
        prompt=[draw(st.integers(0, VOCAB - 1)), *draw(tokens)],
        output=draw(tokens),
        drafts=drafts,
        seed=seed,
        stop_ids=frozenset(draw(st.sets(st.integers(0, VOCAB + 3), max_size=2))),
        bad_words=BadWords.compile(words, SPELLINGS) if words else None,
    )


@given(batch=st.lists(rows(), min_size=1, max_size=5))
@settings(max_examples=250, deadline=None)
def test_any_combination_equals_the_reference(batch):
    result = sample(batch)
    for span, row in enumerate(batch):
        expected = []
        for step in range(1 + len(row.drafts)):
            weights = reference_scores(row, step)
            if not np.isfinite(weights.max()):
                break
            if row.params.temperature:
                position = np.array([len(row.history) + step])
                key = position, np.array([row.seed]), np.array([0])
                weights = weights + ops.gumbel_noise(np.arange(VOCAB), *key)[0]
            expected.append(int(weights.argmax()))
            if step < len(row.drafts) and row.drafts[step] != expected[-1]:
                break
        assert result.tokens[span, : result.counts[span]].tolist() == expected
        assert (span in result.errors) == (not expected)
        assert len(result.logprobs.get(span, [])) == (len(expected) if row.params.logprobs is not None else 0)


@given(batch=st.lists(rows(), min_size=2, max_size=5))
@settings(max_examples=60, deadline=None)
def test_any_combination_is_the_same_alone(batch):
    together = sample(batch)
    for span, row in enumerate(batch):
        alone = sample([row])
        assert alone.counts[0] == together.counts[span]
        assert alone.tokens[0, : alone.counts[0]].tolist() == together.tokens[span, : alone.counts[0]].tolist()
        assert alone.logprobs.get(0) == together.logprobs.get(span)


def test_penalties_cost_little_for_a_long_history():
    """No work that grows with vocabulary times history: a guard against the obvious slow way."""
    import time

    table = SamplingTable(1)
    table.penalised[0], table.repetition[0], table.presence[0], table.prompt_len[0] = True, 1.1, 0.5, 4000
    tokens = np.random.default_rng(0).integers(0, 50_000, (1, 8000)).astype(np.int32)
    batch = SamplingBatch(table, np.zeros(1, np.int32), np.array([8000], np.int32), tokens)
    logits = np.zeros((1, 50_000), np.float32)
    best = min(_timed(lambda: Penalties().apply(logits, batch), time.perf_counter) for _ in range(20))
    assert best < 0.01


def _timed(call, clock):
    start = clock()
    call()
    return clock() - start


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_kth_largest_and_its_equals(library: str) -> None:
    import torch

    from headrace.sampling.stages import _at_least_kth

    rng = np.random.default_rng(0)
    for size in (1, 5, 300):
        values = rng.integers(-6, 1, size).astype(np.float32)  # many equals
        values[rng.random(size) < 0.2] = -np.inf
        for k in (0, 1, 2, size - 1, size, size + 5):
            given = values if library == "numpy" else torch.from_numpy(values)
            found = np.sort(np.asarray(_at_least_kth(given, k)))
            ordered = np.sort(values)
            expected = ordered[ordered >= ordered[-k]] if 0 < k < size else ordered
            np.testing.assert_array_equal(found, expected)
    assert not len(_at_least_kth(np.full(4, np.nan, np.float32), 2))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_end_of_the_nucleus(library: str) -> None:
    """Against sorting the whole vocabulary, for peaked and flat distributions, with equals and impossible tokens."""
    import torch

    from headrace.sampling.stages import _nucleus_end

    rng = np.random.default_rng(0)
    for size in (1, 2, 300, 20000):
        for spread in (0.0, 0.1, 1.0, 4.0, 30.0):
            values = (rng.standard_normal(size) * spread).astype(np.float32)
            values[: size // 3] = np.round(values[: size // 3])  # equals
            values -= values.max()
            values[1:][rng.random(size - 1) < 0.2] = -np.inf
            values[np.argmax(values)] = 0
            ordered = np.sort(values)[::-1]
            reached = np.cumsum(np.exp(ordered), dtype=np.float64)
            for top_p in (0.0, 1e-6, 0.3, 0.9, 0.999, 1 - 2.0**-24):
                given = values if library == "numpy" else torch.from_numpy(values)
                expected = ordered[np.count_nonzero(reached[:-1] < top_p * reached[-1])]
                found = _nucleus_end(given, top_p)
                if library == "numpy" or top_p < 0.99:  # exp of torch may differ in its last bit
                    assert float(found) == expected, (size, spread, top_p)
                assert np.exp(values[values >= float(found)], dtype=np.float64).sum() >= (top_p - 1e-6) * reached[-1]
