"""/v1/responses: OpenAI's client, the events' order, items in, the store."""

from __future__ import annotations

import json

import openai
import pytest
from harness import Server, alive, fixed

from headrace.server.errors import ApiError
from headrace.server.responses.request import chat_body, messages_of
from headrace.server.responses.store import Store, Stored

PATH = "/v1/responses"
FIELDS = {"model": "tiny", "input": "hi", "max_output_tokens": 6, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True, "description": "d"}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def text_of(server: Server, **fields) -> str:
    reply = server.post(PATH, {**FIELDS, **fields})
    assert reply.status == 200, reply.data
    return reply.json["output"][0]["content"][0]["text"]


def test_it_is_the_chat_of_the_same_words(server, client):
    extra = {"extra_body": {"ignore_eos": True}}
    answer = client.responses.create(**FIELDS, instructions="Be kind.", **extra)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, temperature=0, **extra)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.input_tokens == chat.usage.prompt_tokens and answer.usage.output_tokens == 6
    assert answer.id.startswith("resp_") and answer.model == "tiny"


def test_events(server, client):
    whole = client.responses.create(**FIELDS)
    events = server.post(PATH, FIELDS, stream=True).named
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    told = "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))
    assert told == whole.output_text == events[-1]["response"]["output"][0]["content"][0]["text"]
    with client.responses.stream(**FIELDS) as stream:
        for _ in stream:
            pass
    typed = list(client.responses.create(**FIELDS, stream=True))
    assert typed[-1].response.output_text == whole.output_text and typed[-1].response.usage == whole.usage.model_copy(
        update={"input_tokens_details": typed[-1].response.usage.input_tokens_details}
    )


def test_going_on_from_an_answer(server, client):
    first = client.responses.create(**FIELDS)
    second = client.responses.create(**{**FIELDS, "input": "more"}, previous_response_id=first.id)
    said = [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "more"},
    ]  # fmt: skip
    spelt = client.responses.create(**{**FIELDS, "input": said}, store=False)
    assert second.output_text == spelt.output_text and second.usage.input_tokens == spelt.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(first.id)
    for lost in (first.id, spelt.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(lost)
        reply = server.post(PATH, FIELDS, previous_response_id=lost)
        assert reply.status == 400 and reply.json["error"]["param"] == "previous_response_id"


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_and_logprobs(client, stream):
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    fields = {**FIELDS, "max_output_tokens": 200, "text": {"format": form}, "top_logprobs": 2}
    fields["include"] = ["message.output_text.logprobs"]
    answer = (
        list(client.responses.create(**fields, stream=True))[-1].response
        if stream
        else client.responses.create(**fields)
    )
    assert set(json.loads(answer.output_text)) == {"ok"} and answer.status == "completed"
    logprobs = answer.output[0].content[0].logprobs
    assert len(logprobs) == answer.usage.output_tokens and len(logprobs[0].top_logprobs) == 2


def test_items_as_messages():
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "2", "output": "7"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "8"}]},
    ]  # fmt: skip
    developer, user, called, two, one = messages_of(items)
    assert (developer["role"], user["content"]) == ("developer", "ab")
    assert called["reasoning_content"] == "why" and called["content"] == "I look"
    assert [call["function"]["name"] for call in called["tool_calls"]] == ["f", "g"]
    assert two == {"role": "tool", "tool_call_id": "2", "name": "g", "content": "7"} and one["content"] == "8"


def test_tools_are_nested():
    body, _ = chat_body({"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}})
    assert body["tools"] == [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    with pytest.raises(ApiError, match="web_search"):
        chat_body({"input": "a", "tools": [{"type": "web_search"}]})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("input", [[], 5, {}, [5], [{"role": "cat", "content": "a"}],
                   [{"role": "user", "content": [{"type": "input_image"}]}],
                   [{"type": "item_reference", "id": "x"}], [{"type": "function_call"}]]),
        ("instructions", [5, ["a"]]),
        ("max_output_tokens", [0, -1, "5"]),
        ("temperature", [-1, "x"]),
        ("text", [5, {"format": {"type": "xml"}}, {"format": 5}]),
        ("reasoning", [5, {"effort": "huge"}]),
        ("tools", [5, [5], [{"type": "function"}]]),
        ("tool_choice", ["maybe", {"type": "function", "name": "f"}]),
        ("previous_response_id", [5]),
        ("store", ["no"]),
        ("include", [5, [5]]),
        ("top_logprobs", [21, "x", True]),
        ("background", [True]),
        ("truncation", ["auto"]),
        ("stream", ["yes"]),
    ],
)  # fmt: skip
def test_wrong_values_are_named(server, name, values):
    expected = fixed(server)
    for value in values:
        reply = server.post(PATH, {**FIELDS, name: value})
        assert reply.status == 400 and reply.json["error"]["param"] == name, (value, reply.data)
        assert "max_completion" not in reply.message
    alive(server, expected)


def test_fields_beyond_openais(server):
    reply = server.post(PATH, FIELDS, top_k=1, shape="round")
    assert reply.status == 200 and reply.headers["x-headrace-ignored"] == "shape"


def test_an_error_within_a_stream(slow):
    body = {"input": [{"role": "user", "content": "h"}], "max_output_tokens": 50, "stream": True}
    with slow.open(PATH, body):
        pass
    reply = slow.post(PATH, body, chat_template_kwargs={}, timeout=0.2)
    assert reply.status == 200 and reply.named[-1]["type"] == "error"
    assert [each["sequence_number"] for each in reply.named] == list(range(len(reply.named)))


def test_the_store_is_bounded():
    def stored(size: int, caller: str | None = None) -> Stored:
        return Stored(b"{}", [], caller, size)

    store = Store(3, max_bytes=100)
    for name in "abcd":
        store.put(name, stored(10, "me"))
    assert store.get("a", "me") is None and store.get("d", "me") is not None and len(store) == 3
    assert store.get("d", "you") is None and not store.drop("d", "you") and not store.drop("d", None)
    store.put("e", stored(90))
    assert len(store) == 2 and store.num_bytes == 100
    store.put("f", stored(101))
    assert len(store) == 0 and store.num_bytes == 0
    empty = Store(0)
    empty.put("a", stored(1))
    assert len(empty) == 0
