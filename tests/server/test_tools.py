"""Tool calls over HTTP."""

from __future__ import annotations

import json

import pytest
from harness import CHAT, Server, serve_command, strict

from headrace.server.parsers.base import joined_calls
from tiny import TEMPLATE

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "s": {"enum": ["é", "日"]}},
                "required": ["n", "s"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("first", "second")
]
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def hermes(tiny_model, tmp_path_factory):
    template = tmp_path_factory.mktemp("templates") / "tools.jinja"
    names = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    calls = "{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.n + 0 }}"
    template.write_text(names + calls + "{% endfor %}{% endfor %}" + TEMPLATE)
    options = ("--chat-template", str(template), "--served-model-name", "tiny")
    with Server(serve_command(tiny_model, *options)) as running:
        yield running


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "second"}}])
def test_forced_calls(hermes, choice):
    pytest.importorskip("llguidance")
    fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 300, "seed": 3, "parallel_tool_calls": False}
    whole = hermes.chat(**fields).json["choices"][0]
    (one,) = whole["message"]["tool_calls"]
    arguments = json.loads(one["function"]["arguments"])
    assert arguments["n"] in range(10) and arguments["s"] in ("é", "日") and one["id"].startswith("call_")
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] is None
    assert choice == "required" or one["function"]["name"] == "second"
    events = hermes.chat(**fields, stream=True).events
    pieces = [each for event in events for each in event["choices"][0]["delta"].get("tool_calls", [])]
    (streamed,) = joined_calls(pieces)
    assert streamed["function"] == one["function"] and len(pieces) >= 2  # what waits is merged
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_client_of_openai_reads_calls(hermes):
    pytest.importorskip("llguidance")
    import openai

    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0) as client:
        fields = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300}
        answer = client.chat.completions.create(**fields, seed=1).choices[0].message
        with client.chat.completions.stream(**fields, seed=1) as stream:
            final = stream.get_final_completion().choices[0].message
    assert [c.function.arguments for c in final.tool_calls] == [c.function.arguments for c in answer.tool_calls]
    back = [*MESSAGES, answer.model_dump(exclude_none=True), {"role": "tool", "content": "7", "tool_call_id": "x"}]
    again = hermes.post(CHAT, messages=back, tools=TOOLS, max_tokens=2)
    assert again.status == 200, again.data


def test_tools_that_need_not_be_called(hermes):
    plain = hermes.chat(max_tokens=5, seed=1).json
    none = hermes.chat(max_tokens=5, seed=1, tools=TOOLS, tool_choice="none").json
    assert none["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    auto = hermes.chat(max_tokens=5, seed=1, tools=TOOLS)
    assert auto.json["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    assert isinstance(auto.json["choices"][0]["message"]["content"], str)
    assert strict(auto.data)["choices"][0]["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": "x"},
        {"tools": [1]},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]},
        {"tools": TOOLS + TOOLS[:1]},
        {"tools": TOOLS * 100},
        {"tools": TOOLS, "tool_choice": "maybe"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "third"}}},
        {"tools": TOOLS, "tool_choice": {}},
        {"tools": TOOLS, "parallel_tool_calls": 1},
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
    ],
)
def test_wrong_tools(hermes, fields):
    reply = hermes.chat(max_tokens=1, **fields)
    assert reply.status == 400 and reply.message and reply.json["error"]["param"] in ("tools", *fields)


def test_a_template_without_tools(server):
    assert server.chat(tools=TOOLS, max_tokens=1).status == 400
    assert server.chat(tools=[], tool_choice="auto", max_tokens=1).status == 200
