"""The whole engine on a tiny random model: the same tokens alone and in any company, and what users can do wrong."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import LLM, SamplingParams
from headrace.config import ConfigError
from headrace.core.request import RequestError
from headrace.core.scheduler import Scheduler
from headrace.frontend.chat import ChatTemplateError
from tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("windowed"), window=20)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), max_num_seqs=8, max_num_batched_tokens=64, kv_cache="4MiB") as made:
        yield made


def ids(outputs):
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def prompts(count, seed=0, low=3, high=90):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 250, rng.integers(low, high)).tolist() for _ in range(count)]


def test_alone_and_together_are_the_same(llm):
    for params in (GREEDY, GREEDY.with_(temperature=0.9, top_p=0.95, top_k=50, seed=7)):
        batch = prompts(12)
        together = ids(llm.generate(batch, params))
        alone = [ids(llm.generate([prompt], params))[0] for prompt in batch]
        assert together == alone
    assert len(set(map(str, together))) == len(batch)


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("options", [
    dict(max_num_batched_tokens=9, max_num_seqs=3),
    dict(block_size=1),
    dict(block_size=64),
    dict(steps_in_flight=3),
    dict(prefix_caching=False),
    dict(kv_cache=9 * 16 * 2 * 2 * 2 * 12 * 2, max_num_seqs=8),  # nine blocks: preempts all the time
])  # fmt: skip
def test_no_schedule_changes_a_token(llm, folder, windowed, window, options):
    batch = prompts(8)
    params = [GREEDY.with_(temperature=float(i % 2), seed=i) for i in range(8)]
    model = str(windowed if window else folder)
    with LLM(model, kv_cache="4MiB") as plain:
        expected = ids(plain.generate(batch, params))
    with LLM(model, **options) as other:
        assert ids(other.generate(batch, params)) == expected
        other.engine.core.scheduler.check()
        if options.get("kv_cache") and not window:
            assert other.engine.ledger.totals.preemptions > 0


def test_n_choices_differ_and_repeat(llm):
    params = SamplingParams(temperature=1.2, seed=5, n=4, max_tokens=12, ignore_eos=True)
    first, again = llm.generate(["hello"], params), llm.generate(["hello", "other"], params)[:1]
    assert ids(first) == ids(again)
    assert len({tuple(tokens) for tokens in ids(first)[0]}) == 4
    assert ids(llm.generate(["hello"], params.with_(n=1)))[0][0] == ids(first)[0][0]


def test_without_a_seed_answers_vary(llm):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    assert len({tuple(ids(llm.generate(["hello"], params))[0][0]) for _ in range(4)}) > 1


def test_streamed_text_is_the_text(llm):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    updates = list(llm.stream("stream", params))
    whole = llm.generate("stream", params)[0].outputs[0]
    assert "".join(update.text for update in updates) == whole.text
    assert [token for update in updates for token in update.token_ids] == whole.token_ids
    assert updates[-1].choice.finish_reason == "length"


def test_leaving_a_stream_frees_everything(llm):
    for _ in llm.stream("stream", GREEDY):
        break
    assert not llm.engine.has_work
    llm.engine.core.scheduler.check()


def test_a_second_turn_runs_its_new_tokens_only(folder):
    """G4: multi-turn history is found, generated text included; the answer is the one a cold engine gives."""
    with LLM(str(folder)) as warm, LLM(str(folder), prefix_caching=False) as cold:
        first = prompts(1, low=60)[0]
        (answer,) = warm.generate([first], GREEDY)
        second = first + answer.outputs[0].token_ids + [65, 66, 67]
        before = len(warm.engine.ledger.records())
        (found,) = warm.generate([second], GREEDY)
        (computed,) = cold.generate([second], GREEDY)
        assert ids([found]) == ids([computed])
        assert found.num_cached_tokens == (len(second) - 4) // 16 * 16 and computed.num_cached_tokens == 0
        step = warm.engine.ledger.records()[before]
        assert step.num_prefill_tokens + step.num_decode_tokens == len(second) - found.num_cached_tokens


def test_choices_share_the_prompt(folder):
    with LLM(str(folder)) as llm:
        params = SamplingParams(temperature=1.0, seed=1, n=4, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
        (output,) = llm.generate([list(range(50))], params)
        run = sum(r.num_prefill_tokens + r.num_decode_tokens for r in llm.engine.ledger.records())
        assert run == 50 + 3 + 4
        assert len(output.prompt_logprobs) == 50


def test_salts_keep_prompts_apart(folder):
    with LLM(str(folder)) as llm:
        def cached(salt):
            output = llm.engine.submit(list(range(40)), GREEDY, cache_salt=salt)
            while not output.finished:
                llm.engine.step()
            return output.num_cached_tokens

        assert [cached(salt) for salt in (None, None, "a", "b", "a")] == [0, 32, 0, 0, 32]


def test_stop_strings_cut_text_and_bill(llm):
    free = llm.generate("stop", GREEDY)[0].outputs[0]
    stop = free.text[5:7]
    cut = llm.generate("stop", GREEDY.with_(stop=stop))[0].outputs[0]
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.finish_reason == "stop" and cut.stop_reason == stop
    assert len(cut.token_ids) < len(free.token_ids)
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    kept = llm.generate("stop", GREEDY.with_(stop=[stop], include_stop_str_in_output=True))[0].outputs[0]
    assert kept.text == cut.text + stop


def test_stop_token_ids_and_min_tokens(llm):
    free = llm.generate("stop", GREEDY)[0].outputs[0].token_ids
    token = free[6]
    stopped = llm.generate("stop", GREEDY.with_(stop_token_ids=[token]))[0].outputs[0]
    assert stopped.token_ids == free[: free.index(token) + 1]
    assert stopped.finish_reason == "stop" and stopped.stop_reason == token
    later = llm.generate("stop", GREEDY.with_(stop_token_ids=[token], min_tokens=12))[0].outputs[0]
    assert len(later.token_ids) >= 12 and token not in later.token_ids[:12]


def test_limits(llm, folder):
    with LLM(str(folder), max_model_len=32) as small:
        at_limit = small.generate([[1] * 31], GREEDY)[0].outputs[0]
        assert (len(at_limit.token_ids), at_limit.finish_reason) == (1, "length")
        with pytest.raises(RequestError, match=r"32 tokens.*at most 32"):
            small.generate([[1] * 32], GREEDY)
        with pytest.raises(RequestError, match="prompt 1"):
            small.generate([[1], [1] * 40], GREEDY)
        assert not small.engine.has_work


@pytest.mark.parametrize("prompt", [[], [-1], [2**40], [True], ["x"], [1.5]])
def test_bad_prompts_are_refused(llm, prompt):
    with pytest.raises(RequestError):
        llm.generate([prompt], GREEDY)
    assert not llm.engine.has_work


def test_bad_options_are_refused(folder):
    with pytest.raises(TypeError, match="max_num_seqs"):
        LLM(str(folder), max_num_seq=4)
    for options in (
        dict(max_model_len=10**6),
        dict(max_model_len=0),
        dict(kv_cache="lots"),
        dict(kv_cache="1KiB"),
        dict(kv_cache="50KiB", max_model_len=500),
        dict(mode="wrong"),
        dict(steps_in_flight=9),
        dict(max_num_batched_tokens=4, max_num_seqs=8),
        dict(block_size=24, attention_backend="reference"),
        dict(attention_backend="nonsense"),
    ):
        with pytest.raises((ConfigError, ValueError)):
            LLM(str(folder), **options)


@pytest.mark.parametrize(
    "params", [GREEDY, GREEDY.with_(prompt_logprobs=1), GREEDY.with_(n=2, temperature=0.9, seed=1)]
)
def test_a_request_that_nobody_watches_is_told_of_once(llm, params):
    prompt = prompts(1, seed=5, low=40, high=41)[0]
    want = llm.generate([prompt], params)[0]
    engine = llm.engine
    output, updates = engine.submit(prompt, params, live=False), []
    for step in range(1, 200):
        updates += engine.step()
        if output.finished:
            break
        assert not any(choice.token_ids or choice.text for choice in output.outputs if choice.finish_reason is None)
        if step == 5:
            assert engine.num_tokens([output]) >= 4 and engine.num_tokens([]) == 0
    assert [update.token_ids for update in updates] == [choice.token_ids for choice in output.outputs]
    assert output.outputs == want.outputs and output.prompt_logprobs == want.prompt_logprobs
    assert engine.num_tokens([output]) == sum(len(choice.token_ids) for choice in output.outputs)
    assert output.num_cached_tokens == (0 if params.prompt_logprobs else 32), "the first run left the prompt's blocks"


def test_what_an_unwatched_request_has_is_told_when_it_is_broken_off(llm):
    engine, params = llm.engine, GREEDY.with_(prompt_logprobs=0)
    prompt = prompts(1, seed=6, low=40, high=41)[0]
    whole = llm.generate([prompt], params)[0]
    output = engine.submit(prompt, params, live=False)
    while engine.num_tokens([output]) < 7:
        assert not engine.step()
    (update,) = engine.abort(output)
    choice = output.outputs[0]
    assert update.token_ids == choice.token_ids == whole.outputs[0].token_ids[: len(choice.token_ids)]
    assert len(choice.token_ids) == 7 and choice.finish_reason == "abort"
    assert choice.text == engine.tokenizer.decode(choice.token_ids)
    assert output.prompt_logprobs == whole.prompt_logprobs


def test_chat_uses_the_template(llm):
    conversation = [{"role": "user", "content": "hi"}]
    rendered = llm.render(conversation)
    assert llm.engine.tokenizer.decode(rendered, skip_special_tokens=False) == "<|user|>hi<|end|><|assistant|>"
    assert ids(llm.chat(conversation, GREEDY)) == ids(llm.generate([rendered], GREEDY))
    assert len(llm.chat([conversation, conversation], GREEDY)) == 2
    with pytest.raises(ChatTemplateError):
        llm.chat([[]], GREEDY)


def test_the_ledger_saw_every_token(folder):
    with LLM(str(folder)) as fresh:
        outputs = fresh.generate(prompts(5), GREEDY)
        totals, records = fresh.engine.ledger.totals, fresh.engine.ledger.records()
        assert sum(record.num_output_tokens for record in records) == sum(len(o.outputs[0].token_ids) for o in outputs)
        prefilled = sum(record.num_prefill_tokens + record.num_decode_tokens for record in records)
        assert prefilled == sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) - 1 for o in outputs)
        assert totals.steps == len(records) and all(record.total > 0 for record in records)
        assert "120 given out" in fresh.explain()
        with LLM(str(folder), ledger=False) as silent:
            assert ids(silent.generate(prompts(5), GREEDY)) == ids(outputs)
            assert len(silent.engine.ledger) == 0


@settings(max_examples=40, deadline=None)
@given(
    work=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(0, 12), st.none() | st.integers(1, 25)),
        min_size=1,
        max_size=8,
    ),
    budget=st.integers(8, 40),
    blocks=st.integers(6, 24),
    depth=st.integers(1, 3),
)
def test_random_schedules_on_a_real_model(llm, folder, work, budget, blocks, depth):
    """Arrivals, aborts and memory pressure: every token that comes is the one the request gets alone."""
    options = dict(max_num_seqs=6, max_num_batched_tokens=budget, kv_cache=blocks * 16 * 192 * 2, steps_in_flight=depth)
    with LLM(str(folder), max_model_len=90, ledger=False, **options) as busy:
        started = []
        step = 0
        waiting = sorted(enumerate(work), key=lambda item: item[1][2])
        while waiting or busy.engine.has_work:
            while waiting and waiting[0][1][2] <= step:
                index, (length, count, _, aborted) = waiting.pop(0)
                prompt = np.random.default_rng(index).integers(0, 250, length).tolist()
                params = GREEDY.with_(temperature=float(index % 2), seed=index, max_tokens=count)
                output = busy.engine.submit(prompt, params, live=index % 3 > 0)
                started.append((output, prompt, params, aborted and step + aborted))
            for output, _, _, aborted in started:
                if aborted == step:
                    busy.engine.abort(output)
            busy.engine.step()
            busy.engine.core.scheduler.check()
            step += 1
        for output, prompt, params, _ in started:
            choice = output.outputs[0]
            alone = llm.generate([prompt], params)[0].outputs[0]
            if choice.finish_reason == "abort":
                assert choice.token_ids == alone.token_ids[: len(choice.token_ids)]
            else:
                assert choice.token_ids == alone.token_ids
                assert choice.text == alone.text


@pytest.mark.parametrize("length", [1, 17, 33])
def test_prompt_logprobs_come_where_a_prompts_last_part_is_one_token(folder, length):
    """Such a part runs as a decode, and what is told of decodes is told in a loop of its own."""
    params = GREEDY.with_(max_tokens=3, prompt_logprobs=0)
    with LLM(str(folder), max_num_seqs=4, max_num_batched_tokens=16, kv_cache="1MiB") as llm:
        (whole,) = llm.generate(list(range(length)), params)
        *_, last = llm.stream(list(range(length)), params)
    assert len(whole.prompt_logprobs) == length
    assert last.output.prompt_logprobs == whole.prompt_logprobs


def test_steps_of_decodes_bring_nothing_but_tokens(folder, monkeypatch):
    """So that they are committed in the loop made for them, on a CPU too."""
    only = []
    commit = Scheduler.commit
    monkeypatch.setattr(
        Scheduler, "commit", lambda self, plan, result: only.append(result.only_tokens) or commit(self, plan, result)
    )
    with LLM(str(folder), max_num_seqs=4, max_num_batched_tokens=16, kv_cache="1MiB") as llm:
        llm.generate([1, 2, 3], GREEDY.with_(max_tokens=3))
    assert only == [True] * 3
