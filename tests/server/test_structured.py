"""Structured output over HTTP."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import alive, fixed

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


def test_every_spelling(server):
    for fields in (
        {"response_format": FORM},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
    ):
        choice = server.chat(max_tokens=120, seed=1, **fields).json["choices"][0]
        assert set(json.loads(choice["message"]["content"])) == {"ok", "n"} and choice["finish_reason"] == "stop"
    for fields in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}):
        assert server.text(**fields).json["choices"][0]["text"] in ("yes", "no")
    assert server.text(guided_regex="[ab]{3}").json["choices"][0]["text"].strip("ab") == ""
    assert server.text(guided_grammar='start: "x" | "y"').json["choices"][0]["text"] in ("x", "y")


def test_a_stream_is_the_same(server):
    fields = {"response_format": FORM, "max_tokens": 120, "temperature": 1, "seed": 3, "n": 3}
    whole = server.chat(**fields).json
    streamed = server.chat(**fields, stream=True).choices()
    for choice in whole["choices"]:
        assert streamed[choice["index"]] == (choice["message"]["content"], ["stop"])
        json.loads(choice["message"]["content"])


def test_masked_tokens_are_no_infinities(server):  # P10
    reply = server.chat(guided_choice=["aa", "ab"], logprobs=True, top_logprobs=5, temperature=1)
    for entry in reply.json["choices"][0]["logprobs"]["content"]:
        assert entry["logprob"] <= 1e-6 and len(entry["top_logprobs"]) == 5


def test_malformed_after_valid(server):  # G05
    expected = fixed(server)
    good = {"response_format": FORM, "max_tokens": 120, "seed": 2}
    text = server.chat(**good).json["choices"][0]["message"]["content"]
    forms = [
        {"type": "json_schema", "json_schema": {"name": "a", "schema": bad}} for bad in ("", [1], None, 1, "str", False)
    ]
    forms += [{"type": "json_schema"}, {"type": "bogus"}, {"type": None}, [], "json_object", 5, {}]
    for form in forms:
        for stream in (False, True):
            reply = server.chat(response_format=form, stream=stream)
            assert reply.status == 400 and reply.message, form
    for fields in (
        {"structured_outputs": {"json_object": False}},
        {"structured_outputs": {"regex": "a", "json": SCHEMA}},
        {"structured_outputs": {}},
        {"structured_outputs": {"xml": "a"}},
        {"guided_regex": "a", "guided_json": SCHEMA},
        {"guided_choice": []},
        {"guided_choice": ["a", 1]},
        {"guided_regex": "("},
        {"guided_grammar": 'start: "a"\nstart: "b"'},
        {"guided_json": {"type": "array", "uniqueItems": True}},
        {"response_format": FORM, "ignore_eos": True},
    ):
        for stream in (False, True):
            reply = server.chat(**fields, stream=stream)
            assert reply.status == 400 and reply.message, fields
    deep: dict[str, object] = {}
    for _ in range(500):
        deep = {"items": deep}
    assert server.chat(guided_json=deep, max_tokens=1).status in (200, 400)
    assert server.chat(response_format={"type": "text"}, max_tokens=1).status == 200
    true = {"type": "json_schema", "json_schema": {"name": "any", "schema": True}}
    assert server.chat(response_format=true, max_tokens=1).status == 200
    assert server.chat(**good).json["choices"][0]["message"]["content"] == text
    alive(server, expected)


def test_compiling_does_not_stop_others(server):
    """New grammars are compiled beside the steps; every request has its own."""
    with ThreadPoolExecutor(8) as pool:
        started = time.monotonic()
        replies = list(pool.map(lambda i: server.text(guided_regex=f"[ab]{{{i + 1}}}", max_tokens=30), range(16)))
        assert time.monotonic() - started < 20
    assert [len(reply.json["choices"][0]["text"]) for reply in replies] == list(range(1, 17))


def test_a_client_that_goes_while_its_grammar_is_compiled(server):
    words = [f"word{i:05}" for i in range(3000)]
    body = {"prompt": "a", "structured_outputs": {"choice": words}, "max_tokens": 300}
    with server.open("/v1/completions", body):
        pass
    alive(server, fixed(server))
