"""The sampler without options: greedy, temperatures, truncation, independence of rows, damage, drafts."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Row, Spy, drawn, reference_scores, sample, truncated

from headrace.ops.noise import gumbel_noise
from headrace.sampling.params import SamplingParams
from headrace.sampling.sampler import DAMAGED, NONE_ALLOWED
from headrace.sampling.stages import default_stages
from headrace.sampling.state import SamplingBatch

GREEDY = SamplingParams(temperature=0)
VOCAB = 40


def random_logits(seed, rows=None, vocab=VOCAB):
    shape = (vocab,) if rows is None else (rows, vocab)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 3


def support(logits, params, seeds=400):
    """Every token that some seed draws."""
    rows = [Row(logits, params, seed=seed) for seed in range(seeds)]
    return {tokens[0] for tokens in drawn(rows)}


def test_greedy_takes_the_best_and_the_first_of_equals():
    assert drawn([Row([1, 3, 2, 3], GREEDY), Row([-5, -7, -np.inf, -9], GREEDY)]) == [[1], [0]]


TINY = [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-20, 1e-30, 1e-300, 5e-324]


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_tiny_temperatures_equal_greedy_in_a_mixed_batch(scale):
    # field case P04
    rows = []
    for seed in range(20):
        logits = random_logits(seed) * np.float32(scale)
        logits[np.argmax(logits)] += 0.1
        logits[3] = -np.inf
        rows += [Row(logits, SamplingParams(temperature=t), seed=seed) for t in (0, *TINY)]
        rows.append(Row(logits, SamplingParams(temperature=1, logit_bias={0: -100}), seed=seed))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = sample(rows)
    assert not result.errors
    tokens = result.tokens[:, 0].reshape(20, -1)
    assert (tokens[:, :-1] == tokens[:, :1]).all()
    assert (tokens[:, 0] == [np.argmax(row.logits[0]) for row in rows[:: tokens.shape[1]]]).all()


def test_the_highest_temperature_is_nearly_uniform():
    rows = [Row(random_logits(1), SamplingParams(temperature=1e6), seed=seed) for seed in range(4000)]
    seen = np.bincount(sample(rows).tokens[:, 0], minlength=VOCAB)
    assert ((seen - 100.0) ** 2 / 100).sum() < 72.06  # chi-square, 39 degrees of freedom, p = 0.001


def test_draws_follow_the_temperature():
    logits, count = random_logits(2, vocab=6), 20_000
    rows = [Row(logits, SamplingParams(temperature=1.7), seed=seed) for seed in range(count)]
    seen = np.bincount(sample(rows).tokens[:, 0], minlength=6)
    expected = np.exp(logits.astype(float) / 1.7) / np.exp(logits.astype(float) / 1.7).sum() * count
    assert ((seen - expected) ** 2 / expected).sum() < 20.52  # 5 degrees of freedom, p = 0.001


# -- truncation


@given(
    logits=st.lists(st.integers(-6, 6), min_size=2, max_size=12),  # many ties
    top_k=st.sampled_from([0, 1, 2, 3, 5, 12, 50]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.7, 0.5, 0.1, 1e-9, 5e-324]),
    min_p=st.sampled_from([0.0, 5e-324, 0.01, 0.3, 0.99, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
)
@settings(max_examples=200, deadline=None)
def test_truncation_keeps_what_its_definition_keeps(logits, top_k, top_p, min_p, temperature):
    # shares at the very boundary of top_p or min_p depend on rounding; irregular steps keep the examples off it
    logits = np.array(logits) * 0.737
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = truncated(logits / temperature, params)
    noise = gumbel_noise(np.arange(len(logits)), np.ones(40, np.int64), np.arange(40), np.zeros(40, np.int64))
    rows = [Row(logits, params, seed=seed) for seed in range(40)]
    assert [tokens[0] for tokens in drawn(rows)] == (scores + noise).argmax(-1).tolist()


def test_truncation_alone_at_its_extremes():
    logits = [3.0, 1.0, 3.0, 2.0, -np.inf, 2.0]
    assert support(logits, SamplingParams(top_k=1)) == {0, 2}  # ties are kept
    assert support(logits, SamplingParams(top_k=3)) == {0, 2, 3, 5}
    assert support(logits, SamplingParams(top_k=2**31 - 1), 2000) == {0, 1, 2, 3, 5}
    assert support(logits, SamplingParams(top_p=1e-300)) == {0, 2}
    assert support(logits, SamplingParams(min_p=1.0)) == {0, 2}
    assert support(logits, SamplingParams(min_p=math.exp(-1) * 0.999)) == {0, 2, 3, 5}
    assert support([0.0], SamplingParams(top_k=1, top_p=0.1, min_p=1.0)) == {0}


def test_top_p_counts_exactly_over_a_large_vocabulary():
    # one likely token, then 200,000 small ones that get smaller: a float32 sum would move the cut by thousands
    logits = np.concatenate([[0.0], -12 - np.arange(200_000) * 1e-5]).astype(np.float32)
    reached = np.cumsum(np.exp(logits.astype(np.float64)))
    for kept in (1000, 50_000, 150_000):
        spy = Spy()
        share = float((reached[kept - 1] + reached[kept]) / 2 / reached[-1])
        sample([Row(logits, SamplingParams(top_p=share))], stages=[*default_stages(), spy])
        assert abs(np.isfinite(spy.seen).sum() - kept) <= 10  # the share itself is kept in float32


# -- company


def mixed_rows(count=24, vocab=VOCAB):
    options = [
        dict(temperature=0),
        dict(temperature=0.7),
        dict(temperature=1.3, top_p=0.8),
        dict(temperature=1e-6),
        dict(top_k=5, min_p=0.05),
        dict(repetition_penalty=1.4, presence_penalty=0.5),
        dict(logit_bias={3: 50.0}, temperature=0),
        dict(allowed_token_ids=(1, 2, 9)),
        dict(logprobs=3, frequency_penalty=-1.0),
    ]
    rng = np.random.default_rng(5)
    return [
        Row(
            random_logits(i, 3, vocab),
            SamplingParams(**options[i % len(options)]),
            prompt=rng.integers(0, vocab, 4).tolist(),
            output=rng.integers(0, vocab, i % 5).tolist(),
            drafts=rng.integers(0, vocab, 2).tolist(),
            seed=i * 11,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("vocab", [40, 1031])
def test_company_and_order_change_nothing(vocab):
    rows = mixed_rows(vocab=vocab)
    alone = [sample([row]) for row in rows]
    order = np.random.default_rng(1).permutation(len(rows))
    for some in (order, order[::-1], order[:7]):
        result = sample([rows[i] for i in some])
        for span, i in enumerate(some.tolist()):
            count = alone[i].counts[0]
            assert result.counts[span] == count
            assert result.tokens[span, :count].tolist() == alone[i].tokens[0, :count].tolist()
            assert result.logprobs.get(span) == alone[i].logprobs.get(0)  # bit for bit


def test_a_torch_batch_draws_the_same():
    torch = pytest.importorskip("torch")
    rows = mixed_rows()
    assert drawn(rows, wrap=torch.asarray) == drawn(rows)
    ours, theirs = sample(rows), sample(rows, wrap=torch.asarray)
    assert ours.logprobs.keys() == theirs.logprobs.keys()
    for span, entries in ours.logprobs.items():
        for one, other in zip(entries, theirs.logprobs[span], strict=True):
            assert list(one) == list(other)
            assert [x.logprob for x in one.values()] == pytest.approx([x.logprob for x in other.values()], abs=1e-5)


def test_choices_seeds_and_positions_draw_differently():
    flat = np.zeros(1000, np.float32)
    rows = [
        Row(flat, SamplingParams(), seed=s, choice=c, output=[0] * p) for s in (0, 1) for c in (0, 1) for p in (0, 1)
    ]
    assert len({tokens[0] for tokens in drawn(rows)}) == 8


# -- min_tokens


def test_no_end_before_min_tokens():
    # field case P13: a model that wants to end at once
    logits = [1.0, 9.0, 2.0, 8.0]
    for temperature in (0, 1e-3):
        params = SamplingParams(temperature=temperature, min_tokens=2)
        rows = [Row(logits, params, output=[2] * n, stop_ids=frozenset({1, 3, 77})) for n in range(4)]
        assert drawn(rows) == [[2], [2], [1], [1]]


# -- damage


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("extra", [{}, {"top_p": 0.5}, {"top_k": 2, "min_p": 0.1}, {"allowed_token_ids": (3,)}])
@pytest.mark.parametrize("torch_", [False, True])
def test_damaged_logits_are_an_error_of_their_span_alone(temperature, bad, extra, torch_):
    wrap = pytest.importorskip("torch").asarray if torch_ else (lambda array: array)
    params = SamplingParams(temperature=temperature, logprobs=2, **extra)
    rows = [Row(random_logits(i), params) for i in range(4)]
    expected = drawn(rows)
    rows[1].logits[0, 5] = bad
    rows[2].logits[0, :] = -np.inf
    result = sample(rows, wrap=wrap)
    assert result.errors == {1: DAMAGED, 2: DAMAGED}
    assert result.counts.tolist() == [1, 0, 0, 1] and set(result.logprobs) == {0, 3}
    assert result.tokens[[1, 2]].tolist() == [[-1], [-1]]
    assert [result.tokens[0].tolist(), result.tokens[3].tolist()] == [expected[0], expected[3]]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_nothing_allowed_is_said_and_no_token_comes(temperature):
    params = SamplingParams(temperature=temperature, allowed_token_ids=(1, 2), min_tokens=1)
    rows = [Row(random_logits(0), params, stop_ids=frozenset({1, 2})), Row(random_logits(0), params)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = sample(rows)
    assert result.errors == {0: NONE_ALLOWED} and result.counts.tolist() == [0, 1]


# -- drafts


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_drafts_change_no_token(data):
    """Logits as a function of everything before; drafts right, wrong and half right give the text of no drafts."""
    vocab = 7
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0, 0.8])),
        top_p=data.draw(st.sampled_from([1.0, 0.7])),
        presence_penalty=data.draw(st.sampled_from([0.0, 1.5])),
        frequency_penalty=data.draw(st.sampled_from([0.0, -0.7])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.6])),
        min_tokens=data.draw(st.sampled_from([0, 3])),
    )
    common = dict(params=params, prompt=[1, 2], seed=data.draw(st.integers(0, 99)), stop_ids=frozenset({4}))
    plain: list[int] = []
    while len(plain) < 6:
        plain += drawn([Row(model(common["prompt"] + plain, vocab), output=plain, **common)])[0]
    output: list[int] = []
    while len(output) < 6:
        right = plain[len(output) : len(output) + data.draw(st.integers(0, 3))]
        drafts = [data.draw(st.sampled_from([token, 0])) for token in right]
        known = common["prompt"] + output
        logits = [model(known + drafts[:k], vocab) for k in range(len(drafts) + 1)]
        neighbour = Row(random_logits(3, vocab=vocab), GREEDY)
        row = Row(np.array(logits), output=output, drafts=drafts, **common)
        new = drawn([neighbour, row])[1]
        agreed = next((k for k, draft in enumerate(drafts) if draft != plain[len(output) + k]), len(drafts))
        assert len(new) == agreed + 1
        output += new
    assert output[:6] == plain


def test_greedy_rows_without_wishes_take_the_short_way_to_the_same(monkeypatch):
    logits = random_logits(3, rows=9)
    logits[4, 2] = np.nan
    best = logits.argmax(-1).tolist()
    greedy = SamplingParams(temperature=0.0)
    for drafts in ([], [best[6]], [best[6], best[7] + 1]):
        rows = [Row(logits[index : index + 1], greedy) for index in range(6)]
        rows.append(Row(logits[6 : 7 + len(drafts)], greedy, drafts=drafts))
        short = sample(rows)
        with monkeypatch.context() as patched:
            patched.setattr(SamplingBatch, "is_plain", False)
            whole = sample(rows)
        assert short.tokens.tolist() == whole.tokens.tolist() and short.counts.tolist() == whole.counts.tolist()
        assert short.errors == whole.errors == {4: DAMAGED}


def model(tokens, vocab):
    seed = 0
    for token in tokens:
        seed = (seed * 31 + token + 7) % 1_000_003
    return np.random.default_rng(seed).standard_normal(vocab).astype(np.float32) * 2


def test_accepted_bonus_rejected():
    logits = np.eye(4, dtype=np.float32)[[1, 2, 3]]  # wants 1, 2, 3
    for drafts, tokens in [([1, 2], [1, 2, 3]), ([1, 0], [1, 2]), ([0, 2], [1]), ([1, -1], [1, 2])]:
        assert drawn([Row(logits, GREEDY, drafts=drafts), Row(logits[:1], GREEDY)]) == [tokens, [1]]


def test_damage_behind_a_rejected_draft_is_nobodys_error():
    logits = np.eye(4, dtype=np.float32)[[1, 2, 3]]
    logits[1, 0] = np.nan
    rejected = sample([Row(logits, GREEDY, drafts=[0, 2])])
    assert rejected.errors == {} and rejected.tokens[0, :1].tolist() == [1]
    accepted = sample([Row(logits, GREEDY, drafts=[1, 2])])  # the span ends before it; the next step will meet it
    assert accepted.errors == {} and accepted.counts.tolist() == [1] and accepted.tokens[0].tolist() == [1, -1, -1]
    assert sample([Row(logits[1:], GREEDY, output=[1], drafts=[2])]).errors == {0: DAMAGED}


def test_no_logits_no_tokens():
    result = sample([])
    assert result.counts.shape == (0,) and result.errors == {}


def test_the_reference_agrees_with_a_hand_made_case():
    row = Row([2, -1, 0.5, 3], SamplingParams(temperature=0, repetition_penalty=1.5), prompt=[0, 1])
    np.testing.assert_allclose(reference_scores(row), [4 / 3, -1.5, 0.5, 3])
