"""Speculation through the whole engine: the same tokens with it as without, and drafts that are really accepted."""

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.autopilot.depth import AutoDepth
from headrace.config import ConfigError
from headrace.core.drafting import expected_tokens
from headrace.core.plan import Admit
from headrace.core.request import Request
from headrace.spec.base import DraftContext
from headrace.spec.combined import CombinedProposer
from headrace.spec.ngram import NgramProposer
from tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_llama(tmp_path_factory.mktemp("speculation"), layers=1))


def tokens(outputs):
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


ADMIT = Admit(0, "a", [1], 1, 0, GREEDY, 0, 0, frozenset())
PROMPTS = [[65, 66, 67] * 6, list(range(30, 60)), [80, 81] * 10, [90]]


@pytest.mark.parametrize("speculate", ["ngram", "suffix", "auto"])
@pytest.mark.parametrize("options", [{}, {"num_draft_tokens": 3}, {"num_draft_tokens": 8, "steps_in_flight": 3}])
def test_text_is_the_same_and_drafts_are_accepted(folder, options, speculate):
    params = [GREEDY, GREEDY.with_(temperature=0.7, seed=3), GREEDY.with_(repetition_penalty=1.2), GREEDY.with_(n=1)]
    with LLM(folder) as plain, LLM(folder, speculate=speculate, **options) as drafting:
        for each in params:
            expected, found = plain.generate(PROMPTS, each), drafting.generate(PROMPTS, each)
            assert tokens(found) == tokens(expected)
            assert [o.outputs[0].text for o in found] == [o.outputs[0].text for o in expected]
        drafting.engine.core.scheduler.check()
    # with three tokens to choose from, a greedy model falls into loops, which a look-up foresees
    with LLM(folder) as plain, LLM(folder, speculate=speculate, **options) as drafting:
        few = GREEDY.with_(allowed_token_ids=(70, 71, 72))
        assert tokens(drafting.generate(PROMPTS, few)) == tokens(plain.generate(PROMPTS, few))
        assert len(drafting.engine.ledger.records()) < 45, "60 tokens must take clearly fewer steps"
        drafting.engine.core.scheduler.check()


def test_a_request_can_decline(folder):
    with LLM(folder, speculate="ngram", num_draft_tokens=4) as llm:
        llm.generate(PROMPTS[:1], GREEDY.with_(draft_tokens=0))
        assert all(record.num_decode_tokens <= 1 for record in llm.engine.ledger.records())


def test_bad_options_are_refused(folder):
    for options in (
        {"num_draft_tokens": 4},
        {"speculate": "ngram", "num_draft_tokens": 0},
        {"speculate": "magic"},
        {"suffix_tokens": 9},
    ):
        with pytest.raises(ConfigError):
            LLM(folder, **options)


def propose(proposer, text, limit=8):
    table = np.zeros((1, 200), np.int32)
    table[0, : len(text)] = text
    drafts = proposer.propose(DraftContext(np.array([0]), table, np.array([len(text)]), [limit]))
    return [] if drafts is None else [t for t in drafts.tokens[0].tolist() if t >= 0]


class Failing(NgramProposer):
    def propose(self, context):
        raise RuntimeError("out of ideas")


def test_a_proposer_that_fails_is_left_out(caplog):
    proposer = CombinedProposer([("bad", Failing(4)), ("ngram", NgramProposer(4))])
    proposer.admit([ADMIT])
    assert propose(proposer, [7, 8, 7, 8, 7, 8]) == [7, 8, 7, 8]
    assert propose(proposer, [7, 8, 7, 8, 7, 8]) == [7, 8, 7, 8]
    assert proposer.dropped() == ("bad",) and proposer.dropped() == ()
    assert [record.message.count("out of ideas") for record in caplog.records] == [1], "said once"


def test_ngrams_continue_what_came_before():
    proposer = NgramProposer(4)
    proposer.admit([ADMIT])
    assert propose(proposer, [1, 2, 3, 4, 5, 6]) == []
    assert propose(proposer, [1, 2, 3, 4, 5, 6, 2, 3]) == [4, 5, 6, 2]
    assert propose(proposer, [1, 2, 3, 4, 5, 6, 2, 3], limit=1) == [4]
    assert propose(proposer, [1, 2, 3, 4, 5, 6, 2, 3], limit=0) == []
    proposer.admit([ADMIT])  # another sequence in the row: what the first one held is forgotten
    assert propose(proposer, [9, 9, 2, 3]) == []
    proposer.admit([ADMIT])
    assert propose(proposer, [7, 8, 7, 8, 7, 8]) == [7, 8, 7, 8], "a loop goes on"


def test_the_latest_and_longest_match_decides():
    proposer = NgramProposer(2)
    proposer.admit([ADMIT])
    assert propose(proposer, [1, 2, 3, 50, 51, 2, 3, 60, 61, 2, 3]) == [60, 61]
    proposer.admit([ADMIT])
    assert propose(proposer, [1, 2, 3, 50, 51, 9, 2, 3, 60, 61, 1, 2, 3]) == [50, 51]


class Linear:
    """A cost model in which each token of a step adds a share of the step's time."""

    def __init__(self, share):
        self.share = share

    def predict(self, count):
        return 1.0 + self.share * (count - 1)


class Tokens:
    def work(self, spans, num_logits):
        return int(spans[2].sum())


def depth_of(share, acceptance, num_rows=1):
    request = Request("a", [1], GREEDY, max_new_tokens=9)
    request.acceptance[0] = acceptance
    return AutoDepth(Linear(share), Tokens(), 8).depth(request, 8, num_rows)


def test_depth_follows_cost_and_acceptance():
    assert expected_tokens(0.8, 5) == pytest.approx(3.69, abs=0.01)
    assert expected_tokens(1.0, 5) == 6
    assert depth_of(0.01, 0.9) == 8
    assert 0 < depth_of(0.2, 0.6) < depth_of(0.05, 0.6) <= 8
    assert depth_of(0.5, 0.3) == 0
    # when many share the step its time per token is what a draft has to beat
    assert depth_of(0.3, 0.5) > 0 and depth_of(0.9, 0.5, num_rows=32) == 0


@pytest.mark.parametrize("acceptance", [0.1, 0.4, 0.5, 0.9, 0.96, 1.0])  # none that is taken for the prior
@pytest.mark.parametrize("share", [0.01, 0.05, 0.2, 0.5])
def test_the_best_depth_of_all_is_found(share, acceptance):
    rates = {each: expected_tokens(acceptance, each) / (1 + share * each) for each in (1, 2, 3, 4, 5, 6, 8)}
    best = max(rates, key=rates.get)
    assert depth_of(share, acceptance) == (best if rates[best] > 1.02 else 0)


def test_acceptance_is_learnt_and_bad_luck_is_forgiven():
    policy = AutoDepth(Linear(0.3), Tokens(), 4)
    request = Request("a", [1], GREEDY, max_new_tokens=9)
    for _ in range(150):
        policy.observe(request, 4, 0)
    assert request.acceptance[0] < 0.1 and policy.depth(request, 4, 1) == 0
    waited = next(step for step in range(1000) if policy.depth(request, 4, 1))
    assert 5 < waited < 200
    for _ in range(60):
        policy.observe(request, 4, 4)
    assert request.acceptance[0] > 0.95
