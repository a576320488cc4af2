"""Bodies of OpenAI's API: what is taken, and what is refused with the field's name."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.frontend.openai_request import CHAT, COMPLETIONS, BodyError, parse_body
from headrace.sampling.params import SamplingParams

DEFAULTS = SamplingParams(temperature=0.6, top_p=0.9)
HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any):
    return parse_body(CHAT, {"model": "m", "messages": HI, **fields}, DEFAULTS)


def complete(**fields: Any):
    return parse_body(COMPLETIONS, {"model": "m", "prompt": "hi", **fields}, DEFAULTS)


def test_defaults_hold_where_nothing_is_said():
    assert chat().params == DEFAULTS == chat(temperature=None, stop=None, tools=None).params
    assert complete().params == DEFAULTS.with_(max_tokens=16)
    assert chat().messages == HI and complete().prompts == ["hi"] and not chat().stream


def test_every_option_arrives():
    fields = {
        "temperature": 0, "top_p": 0.5, "n": 2, "seed": 3, "stop": ["a", "b"], "presence_penalty": 1, "top_k": 4,
        "frequency_penalty": -1, "logit_bias": {"5": 2}, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [7],
    }  # fmt: skip
    expected = DEFAULTS.with_(**{**fields, "stop": ("a", "b"), "stop_token_ids": (7,)})
    assert chat(**fields).params == expected
    assert complete(**fields, max_tokens=9, logprobs=2, best_of=3).params == expected.with_(
        max_tokens=9, logprobs=2, best_of=3
    )
    assert chat(max_completion_tokens=5, max_tokens=9).params.max_tokens == 5
    assert chat(logprobs=True, top_logprobs=4).params.logprobs == 4
    assert chat(logprobs=True).params.logprobs == 0 and chat(logprobs=False).params.logprobs is None
    assert chat(stop="x").params.stop == ("x",) and chat(stream=True).stream
    assert chat(user="me", metadata={"a": "b"}, response_format={"type": "text"}, tools=[], tool_choice="auto")


def test_messages_and_prompts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "system", "content": None}, {"role": "user", "content": parts, "name": "x"}])
    assert request.messages == [
        {"role": "system", "content": None}, {"role": "user", "content": "ab", "name": "x"}
    ]  # fmt: skip
    for prompt, prompts in (("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2]], [[1], [2]])):
        assert complete(prompt=prompt).prompts == prompts
    assert chat(chat_template_kwargs={"enable_thinking": False}).template == {
        "enable_thinking": False, "add_generation_prompt": True, "continue_final_message": False
    }  # fmt: skip
    assert chat(continue_final_message=True).template["add_generation_prompt"] is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperatur": 1}, "temperatur"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"n": 10**30}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"model": 3}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": "3"}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
        ({"prompt": "hi"}, "prompt"),
    ],
)
def test_refusals_of_chats_name_the_field(fields, param):
    with pytest.raises(BodyError) as refusal:
        chat(**fields)
    assert refusal.value.param == param and str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a", [1]], "n": 0}, "n"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 0}, "best_of"),
        ({"messages": HI}, "messages"),
    ],
)
def test_refusals_of_completions_name_the_field(fields, param):
    with pytest.raises(BodyError) as refusal:
        complete(**fields)
    assert refusal.value.param == param


@pytest.mark.parametrize("body", [None, [], "x", 3, True])
def test_a_body_is_an_object(body):
    with pytest.raises(BodyError, match="must be an object"):
        parse_body(CHAT, body, DEFAULTS)


def test_a_wrong_name_is_corrected():
    with pytest.raises(BodyError, match="did you mean 'temperature'"):
        chat(temprature=1)
