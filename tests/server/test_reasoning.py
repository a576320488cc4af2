"""Reasoning split out of answers over HTTP, alone, with tools and with a form of the answer."""

from __future__ import annotations

import json

import openai
import pytest
from harness import CHAT, Server, serve_command

from headrace.server.conversation import effort_variables, prepared_messages
from headrace.server.parsers.base import joined_calls
from tiny import TEMPLATE, write_tiny_llama

SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>")
OPEN, CLOSE = 260, 261  # ids: 256 bytes, then four special tokens of tiny.py
THINKING = (
    "{% for m in messages %}{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{% endfor %}"
    + TEMPLATE
    + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
    + "{# <tool_call> #}"
)
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    model = write_tiny_llama(tmp_path_factory.mktemp("thinker") / "m", special=SPECIAL, template=THINKING)
    with Server(serve_command(model, "--served-model-name", "tiny")) as running:
        yield running


@pytest.fixture(scope="module")
def fields(thinker) -> dict:
    """Of a request whose greedy or seeded answer has reasoning and an answer: letters, and the closing tag."""
    for seed in range(30):
        found = {"allowed_token_ids": [64, 65, CLOSE], "temperature": 10, "seed": seed, "max_tokens": 6}
        message = thinker.chat(**found).json["choices"][0]["message"]
        if message.get("reasoning") and message["content"] and "<" not in message["content"]:
            return found
    raise AssertionError("no seed ends the reasoning")


def test_whole_and_streamed(thinker, fields):
    whole = thinker.chat(**fields).json
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] and set(message["reasoning"]) <= {"a", "b"}
    events = thinker.chat(**fields, stream=True, stream_options={"include_usage": True}).events
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    for name in ("reasoning", "reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    usage = whole["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(message["reasoning"]) + 1
    assert events[-1]["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]


def test_openai_reads_it(thinker, fields):
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0) as client:
        own = {**fields, "model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        own["extra_body"] = {"allowed_token_ids": own.pop("allowed_token_ids")}
        message = client.chat.completions.create(**own).choices[0].message
        assert message.reasoning_content and message.content


def test_without(thinker, fields):
    message = thinker.chat(**fields, include_reasoning=False).json["choices"][0]["message"]
    assert "reasoning" not in message and message["content"]
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        reply = thinker.chat(**{**fields, "allowed_token_ids": [64, 65]}, **off)
        message = reply.json["choices"][0]["message"]
        assert "reasoning" not in message and len(message["content"]) == 6
        assert reply.json["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert thinker.chat(reasoning_effort="huge", max_tokens=1).status == 400
    assert thinker.chat(include_reasoning="no", max_tokens=1).status == 400


def test_cut_while_thinking(thinker):
    reply = thinker.chat(allowed_token_ids=[64], max_tokens=5, temperature=0).json["choices"][0]
    assert (reply["message"]["content"], reply["message"]["reasoning"]) == ("", "aaaaa")
    assert reply["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_forms_and_calls_come_behind_it(thinker, stream):
    pytest.importorskip("llguidance")
    fields = {"logit_bias": {str(CLOSE): 30}, "max_tokens": 400, "temperature": 10, "stream": stream}
    thought = 0
    for seed in range(4):
        reply = thinker.chat(**fields, seed=seed, response_format=FORM)
        content, reasoning, _, reason = message_of(reply, stream)
        assert set(json.loads(content)) == {"ok"} and reason == "stop"
        called = thinker.chat(**fields, seed=seed, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        content, more, (call,), reason = message_of(called, stream)
        assert set(json.loads(call["function"]["arguments"])) == {"ok"} and not content and reason == "tool_calls"
        thought += bool(reasoning) + bool(more)
    assert thought


def message_of(reply, stream: bool):
    if not stream:
        choice = reply.json["choices"][0]
        message = choice["message"]
        return message["content"], message.get("reasoning", ""), message.get("tool_calls", []), choice["finish_reason"]
    choices = [event["choices"][0] for event in reply.events]
    deltas = [choice["delta"] for choice in choices]
    texts = ["".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning")]
    calls = joined_calls([piece for delta in deltas for piece in delta.get("tool_calls", [])])
    return *texts, calls, choices[-1]["finish_reason"]


def test_reasoning_of_earlier_turns_reaches_the_template(thinker):
    def length(**more) -> int:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **more}]
        return thinker.post(CHAT, messages=messages, max_tokens=1).json["usage"]["prompt_tokens"]

    assert length(reasoning="xyz") == length(reasoning_content="xyz") == length() + len("[xyz]")


def test_messages_as_templates_want_them():
    developer = [{"role": "developer", "content": "x"}]
    assert prepared_messages(developer, "")[0]["role"] == "system"
    assert prepared_messages(developer, "'developer'")[0]["role"] == "developer"
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    (message,) = prepared_messages(
        [{"role": "assistant", "reasoning": "why", "tool_calls": [call]}], "message.thinking"
    )
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1} and message["thinking"] == "why"
    assert effort_variables("high", "reasoning_effort") == {"reasoning_effort": "high"}
    assert effort_variables("none", "enable_thinking") == {"enable_thinking": False}
    assert effort_variables("high", "") is None and effort_variables(None, "") == {}


def test_an_effort_that_the_template_does_not_know(server):
    assert server.chat(max_tokens=1, reasoning_effort="low").headers["x-headrace-ignored"] == "reasoning_effort"
