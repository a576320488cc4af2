"""Log-probabilities: the model's own, finite, in order, and the same through chunks, preemption and drafts."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Row, sample

from headrace.core.kv_layout import KVGroup, KVLayout
from headrace.core.kv_manager import KVCacheManager
from headrace.core.loop import EngineCore
from headrace.core.plan import Logprob, StepResult
from headrace.core.plan_builder import SchedulerLimits
from headrace.core.request import FinishReason, Request
from headrace.core.scheduler import Scheduler
from headrace.executor.inproc import InProcessExecutor
from headrace.sampling.logprobs import SLICE, token_logprobs
from headrace.sampling.params import SamplingParams
from headrace.sampling.sampler import DAMAGED, Sampler
from headrace.spec.combined import CombinedProposer
from headrace.worker.runner import ModelRunner
from headrace.worker.table import RequestTable


def slow(logits, token, count):
    """By definition, in float64: {token: (logprob, rank)} of the best and of `token`."""
    values = np.asarray(logits, np.float64)
    values = values - values.max() - np.log(np.exp(values - values.max()).sum())
    order = sorted(range(len(values)), key=lambda t: (-values[t], t))
    shown = [t for t in order[:count] if np.isfinite(values[t])]
    shown += [token] if token not in shown else []
    return {t: (max(values[t], float(np.finfo(np.float32).min)), order.index(t) + 1) for t in shown}


def check(entry, logits, token, count):
    expected = slow(logits, token, count)
    assert list(entry) == list(expected)
    assert [e.rank for e in entry.values()] == [rank for _, rank in expected.values()]
    np.testing.assert_allclose(
        [e.logprob for e in entry.values()], [v for v, _ in expected.values()], rtol=1e-5, atol=2e-6
    )
    found = [e.logprob for e in entry.values()]
    assert all(np.isfinite(v) and v <= 0 for v in found)
    assert found == sorted(found, reverse=True)


@given(
    logits=st.lists(st.sampled_from([-np.inf, -80.0, -3.0, 0.0, 0.5, 2.0, 90.0]), min_size=1, max_size=9),
    token=st.integers(0, 8),
    count=st.sampled_from([0, 1, 2, 5, 20]),
    torch_=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_entries_equal_their_definition(logits, token, count, torch_):
    if torch_:
        wrap = pytest.importorskip("torch").asarray
    array = np.array([logits], np.float32)
    token %= len(logits)
    (entry,) = token_logprobs(wrap(array) if torch_ else array, [token], [count])
    if np.isfinite(array.max()):
        check(entry, logits, token, count)
    else:
        assert entry == {}


def test_they_are_the_models_own_whatever_the_options():
    # field case P10: greedy, cut to one token, biased, masked: always the same finite numbers
    logits = np.float32([1.0, 3.0, 2.0, -np.inf])
    for options in [
        dict(temperature=0),
        dict(temperature=1.0, top_k=1),
        dict(temperature=7.0, top_p=0.1, min_p=0.9),
        dict(temperature=0, logit_bias={0: -100, 2: -100}),
        dict(temperature=0, allowed_token_ids=(1,)),
        dict(temperature=1.0, repetition_penalty=1.0001, presence_penalty=0.001, top_k=1),
    ]:
        result = sample([Row(logits, SamplingParams(logprobs=5, **options), prompt=[0])])
        assert result.tokens[0, 0] == 1
        ((entry,),) = result.logprobs.values()
        check(entry, logits, 1, 5)
        assert list(entry) == [1, 2, 0]


def test_the_chosen_token_is_there_with_its_rank():
    logits = np.float32([5.0, 1.0, 4.0, 3.0])
    (result,) = sample([Row(logits, SamplingParams(temperature=0, allowed_token_ids=(1,), logprobs=2))]).logprobs[0]
    check(result, logits, 1, 2)
    assert list(result) == [0, 2, 1] and result[1].rank == 4
    (bare,) = sample([Row(logits, SamplingParams(temperature=0, allowed_token_ids=(3,), logprobs=0))]).logprobs[0]
    assert list(bare) == [3] and bare[3].rank == 3


def test_one_entry_for_each_accepted_token():
    logits = np.eye(4, dtype=np.float32)[[1, 2, 3]]
    params = SamplingParams(temperature=0, logprobs=1)
    rows = [
        Row(logits, params, drafts=[1, 0]),
        Row(logits[:1], params.with_(logprobs=None)),
        Row(logits, params, drafts=[1, 2]),
    ]
    assert {span: [list(e) for e in each] for span, each in sample(rows).logprobs.items()} == {
        0: [[1], [2]],
        2: [[1], [2], [3]],
    }


# -- through the worker and the scheduler, over a model whose logits are a function of position and token

VOCAB, MAX_LEN, BLOCK = 23, 128, 4


def logits_of(positions, tokens):
    return np.stack(
        [np.random.default_rng([p, t]).standard_normal(VOCAB) for p, t in zip(positions, tokens, strict=True)]
    ).astype(np.float32)


class FakeModel:
    """Hidden states are (position, token); `widest` is the most logits asked for at once."""

    attention_layers = ()
    taps = ()
    widest = 0
    poison: tuple[int, int] | None = None

    def forward(self, token_ids, positions, attend):
        return np.stack([positions, token_ids], axis=-1)

    def logits(self, hidden):
        if not len(hidden):
            return np.zeros((0, VOCAB), np.float32)
        self.widest = max(self.widest, len(hidden))
        found = logits_of(hidden[:, 0].tolist(), hidden[:, 1].tolist())
        if self.poison is not None:
            found[(hidden == self.poison).all(-1)] = np.nan
        return found


def make_core(num_blocks=64, budget=16, seqs=4, depth=1):
    cache = SimpleNamespace(layout=SimpleNamespace(groups=(), block_size=BLOCK), copy_blocks=lambda copies: None)
    table = RequestTable(seqs, MAX_LEN, 1, BLOCK)
    model = FakeModel()
    runner = ModelRunner(model, cache, table, None, Sampler(), CombinedProposer([]))
    worker = SimpleNamespace(execute=runner.execute, stop=lambda: None)
    layout = KVLayout((KVGroup((0,), 1, 8),), BLOCK, num_blocks)
    scheduler = Scheduler(SchedulerLimits(seqs, budget, MAX_LEN), KVCacheManager(layout))
    return EngineCore(scheduler, InProcessExecutor(worker), depth), model


def run(core):
    tokens, logprobs, prompts, ends = {}, {}, {}, {}
    for _ in range(2000):
        if not core.has_work:
            return tokens, logprobs, prompts, ends
        for out in core.step():
            tokens.setdefault(out.request_id, []).extend(out.token_ids)
            logprobs.setdefault(out.request_id, []).extend(out.logprobs or [])
            if out.prompt_logprobs is not None:
                assert out.request_id not in prompts, "prompt logprobs came twice"
                prompts[out.request_id] = list(out.prompt_logprobs)
            if out.finish_reason is not None:
                ends[out.request_id] = (out.finish_reason, out.error)
    raise AssertionError("the core did not finish")


def make_request(name, prompt, max_tokens, **options):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **options)
    return Request(name, prompt, params, max_new_tokens=max_tokens)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(("num_blocks", "budget"), [(64, 64), (64, 5), (17, 7)])  # whole, chunked, preempted
def test_prompt_and_output_logprobs_survive_every_schedule(num_blocks, budget, depth):
    core, model = make_core(num_blocks, budget, depth=depth)
    rng = np.random.default_rng(3)
    prompts = {str(i): rng.integers(0, VOCAB, n).tolist() for i, n in enumerate([1, 7, 40, 18, 2, 33])}
    requests = []
    for name, prompt in prompts.items():
        options = dict(prompt_logprobs=2, logprobs=3) if name != "3" else {}
        requests.append(make_request(name, prompt, 24, **options))
        core.add(requests[-1])
    tokens, logprobs, found, ends = run(core)
    if num_blocks == 17:
        assert any(request.num_preemptions for request in requests)
    assert {reason for reason, _ in ends.values()} == {FinishReason.LENGTH}
    assert set(found) == set(prompts) - {"3"} and logprobs["3"] == []
    assert model.widest <= max(SLICE, 4)
    for name, prompt in prompts.items():
        whole = prompt + tokens[name]
        if name == "3":
            continue
        assert len(found[name]) == len(prompt) - 1 and len(logprobs[name]) == 24
        for position, entry in enumerate(found[name] + logprobs[name], start=1):
            raw = logits_of([position - 1], [whole[position - 1]])[0]
            check(entry, raw, whole[position], 2 if position < len(prompt) else 3)


def test_a_prompt_preempted_half_way_reports_each_position_once():
    core, _ = make_core(budget=4)
    request = make_request("a", list(range(15)), 3, prompt_logprobs=1)
    core.add(request)
    core.step(), core.step()
    assert len(request.prompt_logprobs) == 8
    core.scheduler._preempt(request)
    _, _, found, _ = run(core)
    for position, entry in enumerate(found["a"], start=1):
        check(entry, logits_of([position - 1], [position - 1])[0], position, 1)
    assert len(found["a"]) == 14


def test_tokens_behind_the_end_bring_no_logprobs():
    core, _ = make_core()
    core.add(make_request("a", [1, 2], 2, logprobs=0))
    plan = core.scheduler.schedule()
    entries = [{token: Logprob(-1.0, 1)} for token in (5, 6, 7)]
    (out,) = core.scheduler.commit(plan, StepResult(plan.step_id, [[5, 6, 7]], [2], logprobs={0: entries}))
    assert out.token_ids == [5, 6] and out.logprobs == entries[:2]


def test_damage_inside_a_prompt_ends_the_request_that_asked():
    core, model = make_core(budget=4)
    model.poison = (2, 5)
    core.add(make_request("asked", [5, 5, 5, 5, 5, 5], 3, prompt_logprobs=0))
    core.add(make_request("other", [5, 5, 5, 5, 5, 5], 3))
    _, _, found, ends = run(core)
    assert ends["asked"] == (FinishReason.ERROR, DAMAGED) and not found
    assert ends["other"][0] == FinishReason.LENGTH


def test_no_token_allowed_reaches_the_user_as_an_error():
    core, _ = make_core()
    params = SamplingParams(max_tokens=4, allowed_token_ids=(3,), min_tokens=2)
    core.add(Request("a", [1, 2], params, max_new_tokens=4, stop_ids=frozenset({3})))
    tokens, _, _, ends = run(core)
    reason, text = ends["a"]
    assert tokens["a"] == [] and reason == FinishReason.ERROR and "no token is allowed" in text
