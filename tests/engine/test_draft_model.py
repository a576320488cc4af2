"""A draft model through the whole engine: the same tokens with it as without, and its own cache's account."""

from itertools import pairwise

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.autopilot.depth import AutoDepth, PassCost
from headrace.config import ConfigError
from headrace.core.drafting import break_even, expected_tokens
from headrace.core.plan import DraftPass, StageTimes, StepPlan, StepResult
from headrace.core.request import Request
from headrace.ledger.machine import MachineFacts
from headrace.ledger.work import StepWork
from headrace.sampling.params import Grammar
from tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = GREEDY.with_(temperature=0.8, seed=3)
PROMPTS = [[65, 66, 67] * 6, list(range(30, 60)), [80, 81] * 10, [90]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The model, the same again, another one, one with a window."""
    folder = tmp_path_factory.mktemp("draft")
    return {
        "target": str(write_tiny_llama(folder / "target")),
        "twin": str(write_tiny_llama(folder / "twin")),
        "other": str(write_tiny_llama(folder / "other", seed=5, layers=1, hidden=32)),
        "window": str(write_tiny_llama(folder / "window", seed=0, window=9)),
        "foreign": str(write_tiny_llama(folder / "foreign", special=("<|x|>",))),
        "renamed": str(write_tiny_llama(folder / "renamed", eos="<|fin|>")),
    }


def everything(outputs):
    return [[(c.token_ids, c.text, c.finish_reason, c.logprobs) for c in o.outputs] for o in outputs]


def runner_of(llm):
    (proposer,) = llm.engine._worker.proposer._proposers.values()
    return proposer.runner


def check(llm):
    llm.engine.core.scheduler.check()
    runner_of(llm).check()


PARAMS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "truncated": SAMPLED.with_(top_k=20, top_p=0.9, min_p=0.01),
    "penalties": SAMPLED.with_(repetition_penalty=1.3, frequency_penalty=0.4),
    "choices": SAMPLED.with_(n=3),
    "bias and bans": SAMPLED.with_(logit_bias={70: 3.0}, bad_words=("A", "th"), allowed_token_ids=tuple(range(99))),
    "logprobs": SAMPLED.with_(logprobs=2),
    "stops": SAMPLED.with_(stop=("a", "Q"), stop_token_ids=tuple(range(0, 200, 7)), min_tokens=5),
    "grammar": SAMPLED.with_(grammar=Grammar("regex", "[a-f]{3,30}x"), ignore_eos=False),
}


@pytest.mark.parametrize("draft", ["twin", "other", "window"])
@pytest.mark.parametrize("name", PARAMS)
def test_text_is_the_same(models, draft, name):
    with (
        LLM(models["target"]) as plain,
        LLM(models["target"], speculate="draft", draft_model=models[draft], num_draft_tokens=4) as drafting,
    ):
        for _ in range(2):  # the second time the prompts are found in both prefix caches
            assert everything(drafting.generate(PROMPTS, PARAMS[name])) == everything(
                plain.generate(PROMPTS, PARAMS[name])
            )
        check(drafting)
        totals = drafting.engine.ledger.totals
        assert totals.draft_tokens > 0
        if draft == "twin":  # the same model draws the same tokens, whatever the stages
            assert totals.accepted_draft_tokens >= 0.85 * totals.draft_tokens


TIGHT = {
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 6},
    "memory pressure": {"kv_cache": 39 * 4 * 192, "block_size": 4, "max_num_seqs": 6, "max_model_len": 90},
    "no prefix cache": {"prefix_caching": False},
    "many steps in flight": {"steps_in_flight": 3},
}


@pytest.mark.parametrize("options", TIGHT.values(), ids=TIGHT.keys())
def test_text_is_the_same_when_it_is_tight(models, options, monkeypatch):
    monkeypatch.setenv("HEADRACE_CHECK", "1")
    prompts = [*PROMPTS, *([each, *range(40, 60)] for each in range(70, 78))]
    params = SAMPLED.with_(n=2, max_tokens=30)
    with (
        LLM(models["target"]) as plain,
        LLM(models["target"], speculate="draft", draft_model=models["twin"], num_draft_tokens=3, **options) as drafting,
    ):
        for _ in range(2):
            assert everything(drafting.generate(prompts, params)) == everything(plain.generate(prompts, params))
            check(drafting)
        if "kv_cache" in options:
            assert any(record.preempted for record in drafting.engine.ledger.records())
        totals = drafting.engine.ledger.totals
        assert totals.accepted_draft_tokens >= 0.9 * totals.draft_tokens > 0


def test_its_own_pool_runs_short_and_requests_go_on(models):
    with (
        LLM(models["target"]) as plain,
        LLM(
            models["target"], speculate="draft", draft_model=models["twin"], num_draft_tokens=3, block_size=4
        ) as drafting,
    ):
        pool = runner_of(drafting).kv.pool
        taken = pool.take(pool.num_free - 9)
        assert everything(drafting.generate(PROMPTS, SAMPLED)) == everything(plain.generate(PROMPTS, SAMPLED))
        pool.release(taken)
        check(drafting)
        assert not drafting.engine.ledger.totals.proposers_dropped


def test_random_arrivals_and_aborts_leave_nothing_behind(models):
    rng = np.random.default_rng(0)
    with LLM(models["target"]) as plain, LLM(
        models["target"], speculate="draft", draft_model=models["other"], num_draft_tokens=5, block_size=4,
        max_num_seqs=4, kv_cache=60 * 4 * 192, max_model_len=90,
    ) as drafting:  # fmt: skip
        engine, alive, done = drafting.engine, [], []
        for step in range(150):
            if step < 100 and rng.random() < 0.4:
                prompt = rng.integers(20, 24, rng.integers(1, 40)).tolist()
                params = SAMPLED.with_(max_tokens=int(rng.integers(1, 40)), seed=step, n=int(rng.integers(1, 3)))
                alive.append((engine.submit(prompt, params), prompt, params))
            engine.step()
            if alive and rng.random() < 0.1:
                engine.abort(alive.pop(int(rng.integers(len(alive))))[0])
            done += [each for each in alive if each[0].finished]
            alive = [each for each in alive if not each[0].finished]
            runner_of(drafting).check()
        for output, prompt, params in done:
            assert everything([output]) == everything(plain.generate([prompt], params))
        assert len(done) > 10
        while engine.has_work:
            engine.step()
        engine.step()
        check(drafting)


def test_what_cannot_draft_is_refused(models):
    for draft, said in (("foreign", "of them, not"), ("renamed", "not b'<|end|>'")):
        with pytest.raises(ConfigError, match="cannot draft for this model") as refused:
            LLM(models["target"], speculate="draft", draft_model=models[draft])
        assert said in str(refused.value)
    for options in (
        {"speculate": "draft"},
        {"draft_model": models["twin"]},
        {"speculate": "ngram", "draft_model": models["twin"]},
        {"speculate": "draft", "draft_model": ""},
    ):
        with pytest.raises(ConfigError):
            LLM(models["target"], **options)


class Linear:
    """A cost model in which each token of a step adds a share of the step's time, as its machine's rates have it."""

    facts = MachineFacts("made up", 1.0, 1 / 1.5, 1, 0.0)

    def predict(self, work):
        return work.flops_linear


class Tokens:
    def work(self, spans, num_logits):
        count = int(spans[2].sum())
        return StepWork(num_tokens=count, flops_linear=1.0 + 0.02 * (count - 1))


def chosen(pass_seconds, acceptance, num_rows=1):
    cost = PassCost(Linear(), Tokens())
    for _ in range(30):
        cost.observe(DraftPass(num_rows, pass_seconds))
    policy = AutoDepth(Linear(), Tokens(), 8, ("suffix", "draft"), {"draft": cost})
    requests = [Request(str(i), [1], GREEDY, max_new_tokens=9) for i in range(num_rows)]
    plain = StepPlan(0, spans=np.ones((4, num_rows), np.int32) * [[1], [1], [1], [0]], yields=np.ones(num_rows, bool))
    for _ in range(4):  # steps without drafts come first
        assert not policy.limits(requests, num_rows).size
        policy.observe_step(plain, StepResult(0, [[1]] * num_rows, [0] * num_rows, times=StageTimes(forward=1.0)))
    policy.prior = dict(enumerate(acceptance))
    policy.accounts.budget(1, num_rows).settle(0.0, 1.0, num_drafts=1000)  # it was tried
    for request in requests:
        request.acceptance = dict(enumerate(acceptance))
    return policy.limits(requests, num_rows)[:, 0].tolist()


def test_the_proposer_that_pays_most_is_asked_and_a_network_only_where_it_pays():
    assert chosen(0.05, (0.2, 0.9)) == [0, 8], "cheap and right: the network alone"
    depths = [chosen(seconds, (0.5, 0.8))[1] for seconds in (0.02, 0.1, 0.3, 0.9)]
    assert all(a >= b for a, b in pairwise(depths)) and depths[0] > depths[-1] == 0, "the dearer the shallower"
    look_up, network = chosen(0.3, (0.9, 0.8))
    assert look_up == 8 and 0 < network < 8, "look-ups are free; the network stands in where they find nothing"
    assert chosen(0.9, (0.9, 0.8)) == [8, 0]


def test_break_even_is_where_drafts_bring_what_they_cost():
    assert break_even(5, 1.0) == pytest.approx(0.0, abs=1e-6)
    for depth, cost in ((1, 1.5), (4, 1.2), (8, 3.0)):
        assert expected_tokens(break_even(depth, cost), depth) == pytest.approx(cost, abs=1e-6)
    assert break_even(3, 5.0) == 1.0
