"""The options through the whole engine, on a tiny random model: refused at the door, honoured in the text."""

import json
import math

import pytest

from headrace import LLM, SamplingParams
from headrace.core.request import RequestError
from tiny import EOS, write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    with LLM(str(folder), max_num_seqs=8, max_num_batched_tokens=24, kv_cache="4MiB") as made:
        yield made


def one(llm, params, prompt="hello"):
    return llm.generate(prompt, params)[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(logit_bias={"100000": 1}), "logit_bias: 100000 is outside the vocabulary"),
        (dict(allowed_token_ids=[5, 100000]), "allowed_token_ids: 100000 is outside the vocabulary"),
        (dict(stop_token_ids=[100000]), "stop_token_ids: 100000 is outside the vocabulary"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(llm, options, text):
    with pytest.raises(RequestError, match=text):
        one(llm, SamplingParams(**options))
    assert not llm.engine.has_work


def test_contradictions_are_refused(llm):
    (letter,) = llm.engine.tokenizer.encode("x")
    with pytest.raises(RequestError, match="bad_words ban every one of allowed_token_ids"):
        one(llm, SamplingParams(allowed_token_ids=(letter,), bad_words=("x",)))
    end = llm.engine.tokenizer.token_id(EOS)
    with pytest.raises(RequestError, match="min_tokens"):
        one(llm, SamplingParams(allowed_token_ids=(end,), min_tokens=1))
    assert one(llm, SamplingParams(allowed_token_ids=(end,))).outputs[0].finish_reason == "stop"


def test_a_dead_end_met_later_is_an_error_and_hurts_nobody(llm):
    x, y = llm.engine.tokenizer.encode("xy")
    stuck = GREEDY.with_(allowed_token_ids=(x, y), bad_words=("xx", "yy", "xyx", "yxy"))
    outputs = llm.generate(["hello", "hello"], [stuck, GREEDY])
    choice = outputs[0].outputs[0]
    assert choice.finish_reason == "error" and "no token is allowed" in choice.error and choice.text in ("xy", "yx")
    assert outputs[1].outputs[0].token_ids == one(llm, GREEDY).outputs[0].token_ids


def test_bias_and_neighbours(llm):
    plain = one(llm, GREEDY).outputs[0].token_ids
    first, other = plain[0], 65
    banned, forced, alone = llm.generate(
        ["hello"] * 3, [GREEDY.with_(logit_bias={first: -100}), GREEDY.with_(logit_bias={str(other): 100}), GREEDY]
    )
    assert first not in banned.outputs[0].token_ids
    assert set(forced.outputs[0].token_ids) == {other}
    assert alone.outputs[0].token_ids == plain


def test_bad_words_never_appear(llm):
    # a byte-level vocabulary without merges: every word is many tokens
    plain = [one(llm, SamplingParams(max_tokens=40, seed=seed, ignore_eos=True)).outputs[0].text for seed in range(8)]
    word = next(text[i : i + 2] for text in plain for i in range(38) if text[i : i + 2].isascii() and text[i] != " ")
    for seed in range(8):
        params = SamplingParams(max_tokens=40, seed=seed, ignore_eos=True, bad_words=(word,))
        assert word not in one(llm, params).outputs[0].text
    assert any(word in text for text in plain)


def test_penalties_see_the_output(llm):
    repeated = GREEDY.with_(logit_bias={70: 100.0}, max_tokens=6)
    assert set(one(llm, repeated).outputs[0].token_ids) == {70}
    choices = one(llm, repeated.with_(frequency_penalty=2.0, logit_bias={70: 20.0}, max_tokens=40)).outputs[0]
    assert len(set(choices.token_ids)) > 1
    presence = [one(llm, GREEDY.with_(max_tokens=1, presence_penalty=p)).outputs[0].token_ids for p in (0, 2)]
    assert presence[0] == presence[1]  # nothing has been written yet


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_agree_with_prompt_logprobs(llm, temperature):
    """Scoring a text as a prompt gives what generating it gave: one model, one contract, greedy or not."""
    params = GREEDY.with_(temperature=temperature, seed=4, logprobs=3, prompt_logprobs=3)
    prompt = "a prompt of more than one chunk of tokens"
    made = one(llm, params, prompt)
    choice, ids = made.outputs[0], made.prompt_token_ids
    assert len(made.prompt_logprobs) == len(ids) and made.prompt_logprobs[0] is None
    assert len(choice.logprobs) == len(choice.token_ids)
    again = one(llm, GREEDY.with_(prompt_logprobs=3, max_tokens=1), ids + choice.token_ids)
    scored = again.prompt_logprobs[len(ids) :]
    for token, ours, theirs in zip(choice.token_ids, choice.logprobs, scored, strict=True):
        assert token in ours and list(ours) == list(theirs)
        for key in ours:
            assert ours[key].logprob == pytest.approx(theirs[key].logprob, abs=1e-4)
            assert ours[key].rank == theirs[key].rank
    json.loads(json.dumps(choice.logprobs), parse_constant=lambda name: pytest.fail(name))
    assert choice.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for e, t in zip(choice.logprobs, choice.token_ids, strict=True))
    )
    if temperature == 0:
        assert all(next(iter(entry)) == token for entry, token in zip(choice.logprobs, choice.token_ids, strict=True))


def test_logprobs_change_no_token(llm):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    texts = {
        tuple(one(llm, params.with_(**options)).outputs[0].token_ids)
        for options in ({}, {"logprobs": 0}, {"logprobs": 20}, {"prompt_logprobs": 5})
    }
    assert len(texts) == 1


def test_choices_share_the_prompt_logprobs(llm):
    output = one(llm, SamplingParams(n=3, seed=1, max_tokens=4, prompt_logprobs=0, ignore_eos=True))
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert all(choice.logprobs is None for choice in output.outputs)
    params = SamplingParams(n=2, prompt_logprobs=3)
    asked = [r.wants_prompt_logprobs for r in llm.engine._input.prepare("r", "hello", params).requests]
    assert asked == [True, False]  # so the others may use a cached prefix


def test_best_of(llm):
    params = SamplingParams(temperature=1.5, seed=9, max_tokens=10, logprobs=0)
    candidates = one(llm, params.with_(n=6)).outputs
    ranked = sorted(candidates, key=lambda c: -c.cumulative_logprob / len(c.token_ids))
    best = one(llm, params.with_(n=2, best_of=6))
    assert [c.token_ids for c in best.outputs] == [c.token_ids for c in ranked[:2]]
    assert [c.index for c in best.outputs] == [0, 1]
    updates = list(llm.stream("hello", params.with_(n=1, best_of=6, logprobs=None)))
    assert [update.text for update in updates] == [ranked[0].text] and updates[0].logprobs is None
    assert math.isfinite(updates[0].choice.cumulative_logprob)
    assert not llm.engine.has_work


def test_every_option_at_once_in_any_company(llm):
    params = SamplingParams(
        temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.2, logit_bias={5: 3.0}, allowed_token_ids=tuple(range(200)), bad_words=("ab", "é"),
        min_tokens=3, max_tokens=20, logprobs=5, prompt_logprobs=1, n=2, best_of=3, seed=12,
    )  # fmt: skip
    alone = one(llm, params)
    crowd = llm.generate(["hello"] + ["something else altogether"] * 6, [params] + [SamplingParams(max_tokens=15)] * 6)[
        0
    ]
    assert [c.token_ids for c in crowd.outputs] == [c.token_ids for c in alone.outputs]
    assert all(set(c.token_ids) <= set(range(200)) for c in alone.outputs)
