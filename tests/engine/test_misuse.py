"""What users do to an LLM that it must take: threads, streams read in turns, wrong types, use after close."""

import os
import signal
import threading

import numpy as np
import pytest
from tokenizers import Tokenizer

from headrace import LLM, SamplingParams
from headrace.core.request import RequestError
from tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("misuse"))


@pytest.fixture()
def llm(folder):
    with LLM(str(folder)) as made:
        yield made


def text(llm, prompt):
    return llm.generate(prompt, GREEDY)[0].outputs[0].text


def test_streams_read_in_turns_lose_nothing(llm):
    expected = [text(llm, prompt) for prompt in ("one", "another")]
    pieces = ["", ""]
    for first, second in zip(llm.stream("one", GREEDY), llm.stream("another", GREEDY), strict=True):
        pieces[0] += first.text
        pieces[1] += second.text
    assert pieces == expected


def test_generating_inside_a_stream_loses_nothing(llm):
    expected = text(llm, "outer")
    seen = ""
    for update in llm.stream("outer", GREEDY):
        seen += update.text
        llm.generate(["inner"], GREEDY.with_(max_tokens=3))
    assert seen == expected


def test_threads_share_an_llm(llm):
    prompts = [f"thread {i}" for i in range(8)]
    expected = [text(llm, prompt) for prompt in prompts]
    found: dict[int, list[str]] = {}

    def work(index):
        streamed = "".join(update.text for update in llm.stream(prompts[index], GREEDY))
        found[index] = [streamed, text(llm, prompts[index])]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(8)] == [[one, one] for one in expected]
    assert not llm.engine.has_work


def test_after_close_everything_says_so(folder):
    with LLM(str(folder)) as llm:
        llm.close()
        llm.close()
        with pytest.raises(RequestError, match="closed"):
            llm.generate("x", GREEDY)
        with pytest.raises(RequestError, match="closed"):
            next(llm.stream("x", GREEDY))


@pytest.mark.parametrize("prompts", [None, 5, {}, b"abc", [None], [b"abc"], [5.5], [[1.5]], {"a": 1}])
def test_things_that_are_no_prompts(llm, prompts):
    with pytest.raises(RequestError):
        llm.generate(prompts, GREEDY)
    assert not llm.engine.has_work


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", 5, [5]])
def test_things_that_are_no_params(llm, params):
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate(["a"], params)


@pytest.mark.parametrize("priority", ["high", None, 1.5, float("nan"), 10**400, True])
def test_a_bad_priority_is_refused_and_harms_nobody(folder, priority):
    with LLM(str(folder), scheduling="priority") as llm:
        with pytest.raises(RequestError, match="priority"):
            llm.engine.submit("a", GREEDY, priority=priority)
        assert text(llm, "a")


def test_numpy_ids_are_ids(llm):
    ids = np.array([65, 66, 67])
    expected = llm.generate([[65, 66, 67]], GREEDY)[0].outputs[0].token_ids
    for prompts in (ids, [ids], list(ids), [list(ids)], np.array([[65, 66, 67]])):
        assert llm.generate(prompts, GREEDY)[0].outputs[0].token_ids == expected


def test_a_single_prompts_error_names_no_number(llm):
    with pytest.raises(RequestError) as error:
        llm.generate([[1] * 5000], GREEDY)
    assert "prompt 0" not in str(error.value)


def test_a_text_far_too_long_is_refused_before_it_is_cut(llm):
    with pytest.raises(RequestError, match="characters"):
        llm.generate("a" * 5_000_000, GREEDY)


def test_tokens_that_the_model_has_no_row_for(tmp_path):
    folder = write_tiny_llama(tmp_path / "more")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["<big>"])  # as a fine-tune does whose embedding was never resized
    tokenizer.save(str(folder / "tokenizer.json"))
    with LLM(str(folder)) as llm:
        assert max(llm.engine.tokenizer.encode("a<big>b")) == llm.engine.spec.vocab_size
        with pytest.raises(RequestError, match="which the tokenizer knows but the model does not"):
            llm.generate("a<big>b", GREEDY)
        assert text(llm, "ab")


@pytest.fixture
def ctrl_c():
    """SIGINT as a terminal's programs have it; shells let what they start in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_engine_that_speculates_goes_on_after_ctrl_c_within_a_step(folder, monkeypatch, ctrl_c, streamed):
    """What is half done when a user interrupts it is finished first: else the step would be missed for ever."""
    params, prompt = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), [1, 2, 3]
    with LLM(str(folder), speculate="ngram", max_num_seqs=4, kv_cache="1MiB") as llm:
        (want,) = llm.generate(prompt, params)
        with monkeypatch.context() as patch:
            execute, calls = llm.engine._worker.execute, []

            def interrupted(plan):
                calls.append(plan)
                if len(calls) == 3:
                    os.kill(os.getpid(), signal.SIGINT)
                return execute(plan)

            patch.setattr(llm.engine._worker, "execute", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(llm.stream(prompt, params)) if streamed else llm.generate([prompt] * 2, params)
        assert len(calls) == 3 and not llm.engine.has_work
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert llm.generate(prompt, params)[0].outputs == want.outputs
        llm.engine.core.scheduler.check()
