"""Anthropic's /v1/messages: its client, the events' order, blocks in, errors in its shape."""

from __future__ import annotations

import anthropic
import pytest
from harness import CHAT, alive, fixed

from headrace.server.anthropic.request import chat_body
from headrace.server.errors import ApiError

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
MESSAGES = [{"role": "user", "content": "hi"}]
FIELDS = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6}
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_it_is_the_chat_of_the_same_words(server, client):
    answer = client.messages.create(**FIELDS, system="Be kind.", extra_body=GREEDY)
    messages = [{"role": "system", "content": "Be kind."}, *MESSAGES]
    chat = server.post(CHAT, messages=messages, max_tokens=6, **GREEDY).json
    assert answer.content[0].text == chat["choices"][0]["message"]["content"]
    assert (answer.stop_reason, answer.stop_sequence, answer.usage.output_tokens) == ("max_tokens", None, 6)
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]


def test_events(server, client):
    whole = server.post(PATH, FIELDS, **GREEDY).json
    events = server.post(PATH, FIELDS, **GREEDY, stream=True).named
    kinds = [event["type"] for event in events]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(event["delta"]["text"] for event in events[2:-3]) == whole["content"][0]["text"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    with client.messages.stream(**FIELDS, extra_body=GREEDY) as stream:
        final = stream.get_final_message()
    assert final.content[0].text == whole["content"][0]["text"] and final.usage.output_tokens == 6


def test_a_stop_sequence(server):
    body = {**FIELDS, "max_tokens": 60, "stop_sequences": ["a", "zz"], "logit_bias": {"64": 5}, "seed": 1}
    whole = server.post(PATH, body).json
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "a")
    assert server.post(PATH, body, stream=True).named[-2]["delta"] == {
        "stop_reason": "stop_sequence", "stop_sequence": "a",
    }  # fmt: skip
    ended = server.post(PATH, {**FIELDS, "logit_bias": {"256": 100}}).json
    assert (ended["stop_reason"], ended["stop_sequence"], ended["content"]) == ("end_turn", None, [])


def test_counting(server, client):
    count = client.messages.count_tokens(model="tiny", messages=MESSAGES, system="Be kind.").input_tokens
    usage = server.post(PATH, FIELDS, system="Be kind.").json["usage"]
    assert count == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert server.post(COUNT, messages=[{"role": "user", "content": "x" * 5000}]).json["input_tokens"] > 5000


def test_blocks_as_messages():
    given = {
        "max_tokens": 1,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "why", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look"}, {"type": "tool_use", "id": "1", "name": "f", "input": {"é": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "is_error": True,
                 "content": [{"type": "text", "text": "no"}]},
                {"type": "text", "text": "so?"},
            ]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "max"},
    }  # fmt: skip
    body, ignored = chat_body(given, "enable_thinking")
    system, user, called, result, more = body["messages"]
    assert (system, user["content"]) == ({"role": "system", "content": "s"}, "a")
    assert ignored == ["thinking.budget_tokens"]  # how much is thought is up to the model
    assert (called["content"], called["reasoning_content"]) == ("I look", "why")
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"é": 1}'}
    assert result == {"role": "tool", "tool_call_id": "1", "name": "f", "content": "Error: no"}
    assert more == {"role": "user", "content": "so?"}
    assert body["tools"][0]["function"] == {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert body["tool_choice"]["function"]["name"] == "f" and body["parallel_tool_calls"] is False
    assert body["include_reasoning"] and body["chat_template_kwargs"] == {"enable_thinking": True}
    assert body["reasoning_effort"] == "xhigh"
    off, _ = chat_body({"max_tokens": 1, "messages": MESSAGES}, "enable_thinking")
    assert not off["include_reasoning"] and off["chat_template_kwargs"] == {"enable_thinking": False}
    with pytest.raises(ApiError, match="image"):
        chat_body({"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("messages", [[], 5, [5], [{"role": "cat", "content": "a"}], [{"role": "user", "content": 5}],
                      [{"role": "user", "content": [{"type": "tool_result"}]}],
                      [{"role": "assistant", "content": [{"type": "tool_use"}]}]]),
        ("max_tokens", [0, -1, "5", None]),
        ("system", [5, [5]]),
        ("stop_sequences", ["a", [5], [""]]),
        ("temperature", [-1, "x"]),
        ("tools", [5, [5], [{"type": "web_search_20250305", "name": "web_search"}], [{"name": "a b"}]]),
        ("tool_choice", ["auto", {"type": "any"}, {"type": "maybe"}]),
        ("thinking", [True, {"type": "maybe"}, {"type": "enabled", "budget_tokens": "many"}]),
        ("output_config", [5, {"format": {"type": "xml"}}]),
        ("stream", ["yes"]),
    ],
)  # fmt: skip
def test_wrong_values_are_named(server, name, values):
    expected = fixed(server)
    for value in values:
        reply = server.post(PATH, {**FIELDS, name: value})
        error = reply.json
        assert reply.status == 400 and error["type"] == "error", (value, reply.data)
        assert error["error"]["type"] == "invalid_request_error" and error["error"]["param"] == name, (
            value,
            reply.data,
        )
    alive(server, expected)


def test_errors_have_its_shape(server, client):
    with pytest.raises(anthropic.NotFoundError, match="other"):
        client.messages.create(**{**FIELDS, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="roles must alternate"):
        client.messages.create(**{**FIELDS, "messages": MESSAGES * 2})
    assert server.ask("POST", PATH, b"[").json["type"] == "error" == server.ask("GET", PATH).json["type"]


def test_an_error_within_a_stream(slow):
    reply = slow.post(PATH, {**FIELDS, "model": None, "max_tokens": 500, "stream": True, "timeout": 0.4})
    assert reply.status == 504 or reply.named[-1]["error"]["type"] == "timeout_error"
