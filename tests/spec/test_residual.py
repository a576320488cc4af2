"""Rejection sampling of drafts: the distribution of what comes out, under every logits stage and by every proposer."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.config import ConfigError
from headrace.core.plan import Admit
from headrace.sampling.params import BadWords
from headrace.sampling.residual import DRAFT_STREAM, ResidualSampler, coins, distribution
from headrace.sampling.sampler import Sampler
from headrace.sampling.state import SamplingBatch, SamplingTable
from tiny import write_tiny_llama

VOCAB, COUNT = 5, 5000
PROMPT = [0, 3]
STAGES = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.8},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {1: 1.5, 2: -2.0}},
    "allowed tokens": {"allowed_token_ids": (0, 1, 4)},
    "bad words": {"bad_words": ("x",)},
    "min_tokens": {"min_tokens": 2},
}


def of_model(seed):
    """Logits after each text of up to two tokens: a table [V + 1, V + 1, V], whose last index stands for no token."""
    return np.random.default_rng(seed).normal(0, 1.3, (VOCAB + 1, VOCAB + 1, VOCAB)).astype(np.float32)


@dataclass
class Rows:
    """COUNT requests with different seeds that have all said the same prompt."""

    options: dict
    tokens: np.ndarray = field(init=False)

    def __post_init__(self):
        self.table = SamplingTable(COUNT)
        self.tokens = np.full((COUNT, 16), -1, np.int32)
        self.tokens[:, : len(PROMPT)] = PROMPT
        words = BadWords.compile(("x",), {b"x": [2], b" x": [], b" ": []}) if "bad_words" in self.options else None
        params = SamplingParams(**self.options)
        for row in range(COUNT):
            self.table.set(Admit(row, str(row), PROMPT, 2, 0, params, row, 0, frozenset({3}), words))

    def batch(self, rows, offset, stream=0):
        return SamplingBatch(self.table, rows, np.full(len(rows), len(PROMPT) + offset, np.int32), self.tokens, stream)

    def said(self, rows):
        """The last two tokens behind the prompt, for a look into a model's table."""
        said = self.tokens[rows, len(PROMPT) : len(PROMPT) + 2]
        return np.where(said < 0, VOCAB, said).T

    def forget(self, first=0):
        self.tokens[:, len(PROMPT) + first :] = -1


ALL = np.arange(COUNT)


def drafted(rows, model):
    """Two tokens of each row from a drafting model, and what they were drawn from."""
    sampler, probs = Sampler(), []
    for offset in range(2):
        logits = model[tuple(rows.said(ALL))]
        chosen, _, staged = sampler.draw(logits, rows.batch(ALL, offset, DRAFT_STREAM))
        rows.tokens[:, len(PROMPT) + offset] = chosen
        probs.append([distribution(each) for each in staged])
    rows.table.draft_start[:] = len(PROMPT)
    for row in ALL:
        rows.table.draft_probs[row] = np.stack([probs[0][row], probs[1][row]])


def looked_up(rows, model):
    """Two certain tokens, the same for all: what a look-up drafts."""
    rows.tokens[:, len(PROMPT) : len(PROMPT) + 2] = [1, 4]


def verified(rows, model, sampler):
    """The first two tokens of each request, and the third where it came: drafts judged once, the rest drawn plainly."""
    drafts = rows.tokens[:, len(PROMPT) : len(PROMPT) + 2].copy()
    none = np.full(COUNT, VOCAB)
    logits = np.stack([model[none, none], model[drafts[:, 0], none], model[drafts[:, 0], drafts[:, 1]]], axis=1)
    spans = np.repeat(ALL, 3)
    positions = np.tile(len(PROMPT) + np.arange(3, dtype=np.int32), COUNT)
    batch = SamplingBatch(rows.table, spans, positions, rows.tokens)
    following = np.concatenate([drafts, np.full((COUNT, 1), -1, np.int32)], axis=1).ravel()
    sampled = sampler.sample(logits.reshape(-1, VOCAB), batch, spans, COUNT, following)
    assert not sampled.errors
    tokens = np.full((COUNT, 3), -1)
    tokens[:, : sampled.tokens.shape[1]] = sampled.tokens
    rest = np.flatnonzero(tokens[:, 1] < 0)
    rows.forget()
    rows.tokens[:, len(PROMPT)] = tokens[:, 0]
    chosen, _, _ = sampler.draw(model[tuple(rows.said(rest))], rows.batch(rest, 1))
    tokens[rest, 1] = chosen
    return tokens


def expected(options, model):
    """Probabilities [V, V] of the first two tokens without drafts, by the stages alone."""
    rows, sampler = Rows(options), Sampler()
    _, _, staged = sampler.draw(model[tuple(rows.said(ALL[:1]))], rows.batch(ALL[:1], 0))
    first = distribution(staged[0].astype(np.float64))
    joint = np.zeros((VOCAB, VOCAB))
    for token in range(VOCAB):
        rows.tokens[0, len(PROMPT)] = token
        _, _, staged = sampler.draw(model[tuple(rows.said(ALL[:1]))], rows.batch(ALL[:1], 1))
        joint[token] = first[token] * distribution(staged[0].astype(np.float64))
    return joint


def misfit(counts, probs):
    """(chi-square over its critical value at p = 0.0005, total variation); cells of few are taken together."""
    counts, wanted = counts.ravel(), probs.ravel() * counts.sum()
    few = wanted < 8
    assert not counts[wanted == 0].any(), "a token that cannot be"
    counts = np.append(counts[~few], counts[few].sum())
    wanted = np.append(wanted[~few], wanted[few].sum())
    keep = wanted > 0
    statistic = ((counts - wanted)[keep] ** 2 / wanted[keep]).sum()
    degrees = max(1, keep.sum() - 1)
    critical = degrees * (1 - 2 / (9 * degrees) + 3.29 * np.sqrt(2 / (9 * degrees))) ** 3  # Wilson and Hilferty 1931
    return statistic / critical, 0.5 * np.abs(counts - wanted).sum() / counts.sum()


def counted(tokens):
    return np.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB * VOCAB)


@pytest.mark.parametrize("propose", [drafted, looked_up])
@pytest.mark.parametrize("name", STAGES)
def test_the_distribution_is_that_without_drafts(name, propose):
    target, other = of_model(1), of_model(2)
    rows = Rows(STAGES[name])
    propose(rows, 0.7 * target + 0.3 * other)
    tokens = verified(rows, target, ResidualSampler())
    chi_square, variation = misfit(counted(tokens), expected(STAGES[name], target))
    assert chi_square < 1 and variation < 0.04


@pytest.mark.parametrize("closeness", [0.0, 0.5, 0.9])
def test_more_drafts_are_accepted_the_closer_the_models_are(closeness):
    target, other = of_model(1), of_model(2)
    draft = closeness * target + (1 - closeness) * other
    rows = Rows({})
    drafted(rows, draft)
    first = rows.tokens[:, len(PROMPT)].copy()
    tokens = verified(rows, target, ResidualSampler())
    p, q = (distribution(model[VOCAB, VOCAB].astype(np.float64)) for model in (target, draft))
    # accepted with probability sum(min(p, q)); what is drawn instead of a refused one is never the same token
    assert np.mean(tokens[:, 0] == first) == pytest.approx(np.minimum(p, q).sum(), abs=0.03)
    complete = tokens[tokens[:, 2] >= 0]
    wanted = np.stack([distribution(row) for row in target[complete[:, 0], complete[:, 1]].astype(np.float64)]).mean(0)
    assert misfit(np.bincount(complete[:, 2], minlength=VOCAB), wanted)[0] < 1, "the token after a whole draft"


class Threshold(ResidualSampler):
    """What some texts say: a draft is accepted if the model holds it likely enough."""

    def judge(self, chosen, drawn, staged, batch, spans, drafts):
        probs = np.stack([distribution(each) for each in staged])
        return np.where(drafts >= 0, drafts, chosen), (drafts >= 0) & (
            probs[np.arange(len(drafts)), np.maximum(drafts, 0)] > 0.15
        )


def test_the_test_finds_a_wrong_verifier():
    target, other = of_model(1), of_model(2)
    rows = Rows({})
    drafted(rows, 0.5 * target + 0.5 * other)
    assert misfit(counted(verified(rows, target, Threshold())), expected({}, target))[0] > 3


def test_coins_are_even_and_independent_of_each_other():
    rows = Rows({})
    first, second = (coins(rows.batch(ALL, offset), ALL) for offset in range(2))
    assert misfit(np.bincount((first * 10).astype(int), minlength=10), np.full(10, 0.1))[0] < 1
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_greedy_rows_know_no_chance():
    target = of_model(1)
    rows = Rows({"temperature": 0.0})
    drafted(rows, target)
    plain, judged = (verified_again(rows, target, sampler) for sampler in (Sampler(), ResidualSampler()))
    assert (plain == judged).all() and (judged[:, 2] >= 0).all()


def verified_again(rows, model, sampler):
    kept = rows.tokens.copy()
    tokens = verified(rows, model, sampler)
    rows.tokens[:] = kept
    return tokens


# -- through the whole engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("residual")
    for name, layers in (("target", 2), ("draft", 1)):
        write_tiny_llama(folder / name, layers=layers)
    return folder


@pytest.mark.parametrize("speculate", ["draft", "ngram", "suffix", "auto"])
def test_engine_draws_what_the_model_would(folder, speculate):
    allowed = (65, 66, 67)
    params = SamplingParams(temperature=1.0, allowed_token_ids=allowed, max_tokens=4, ignore_eos=True, n=120, seed=0)
    prompt = [65, 66, 67, 65, 66, 67, 65, 66]
    options = {"draft_model": str(folder / "draft")} if speculate in ("draft", "auto") else {}

    def counts(llm):
        seen = np.zeros(27, int)
        for seed in range(12):
            (output,) = llm.generate([prompt], params.with_(seed=seed))
            for choice in output.outputs:
                a, b, c = (allowed.index(token) for token in choice.token_ids[1:])
                seen[9 * a + 3 * b + c] += 1
        return seen

    with (
        LLM(str(folder / "target")) as plain,
        LLM(str(folder / "target"), speculate=speculate, verify="residual", num_draft_tokens=3, **options) as drafting,
    ):
        reference, found = counts(plain), counts(drafting)
        totals = drafting.engine.ledger.totals
        assert 0 < totals.accepted_draft_tokens < totals.draft_tokens
        drafting.engine.core.scheduler.check()
    both = reference + found
    keep = both >= 10
    statistic = ((reference - found)[keep] ** 2 / both[keep]).sum()  # two samples of one size
    degrees = keep.sum() - 1
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.29 * np.sqrt(2 / (9 * degrees))) ** 3


def test_drafts_of_the_model_itself_are_never_refused(folder):
    write_tiny_llama(folder / "twin")
    params = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2, max_tokens=40, ignore_eos=True, n=3)
    with LLM(
        str(folder / "target"), speculate="draft", verify="residual", draft_model=str(folder / "twin"),
        num_draft_tokens=4,
    ) as llm:  # fmt: skip
        llm.generate([[65, 66, 67] * 6, list(range(30, 60))], params)
        totals = llm.engine.ledger.totals
        assert totals.accepted_draft_tokens == totals.draft_tokens > 100


def test_synthetic_acceptance_is_what_was_asked_for_and_says_so(folder):
    with LLM(str(folder / "target"), speculate="synthetic", synthetic_acceptance=0.7, num_draft_tokens=4) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
        llm.generate([[60 + i] for i in range(12)], params)
        verified, accepted = llm.engine.ledger.totals.draft_positions[0]
        assert accepted / verified == pytest.approx(0.7, abs=0.06) and verified > 300
        assert "SYNTHETIC" in llm.engine.config.label
        assert any("not the model's" in choice.reason for choice in llm.engine.choices)
        llm.engine.core.scheduler.check()


def test_bad_options(folder):
    for options in (
        {"verify": "residual"},
        {"verify": "loosely", "speculate": "ngram"},
        {"speculate": "synthetic"},
        {"synthetic_acceptance": 0.5},
        {"speculate": "synthetic", "synthetic_acceptance": 1.5},
    ):
        with pytest.raises(ConfigError):
            LLM(str(folder / "target"), **options)
