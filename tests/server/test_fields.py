"""Fields beyond the usual ones, over HTTP; and wrong types of those of chats."""

from __future__ import annotations

import pytest
from harness import CHAT, Server, alive, fixed, serve_command

from tiny import TEMPLATE

EOS, USER = 256, 257  # special tokens of the tiny model


def test_min_tokens_then_the_end(server):  # P13
    fields = {"logit_bias": {str(EOS): 100}, "max_tokens": 8, "temperature": 0}
    for least in (0, 2, 5):
        whole = server.text(**fields, min_tokens=least).json
        assert whole["usage"]["completion_tokens"] == least + 1 and whole["choices"][0]["finish_reason"] == "stop"
    kept = server.text(allowed_token_ids=[64, EOS], logit_bias={"64": 5}, min_tokens=3, max_tokens=5, stop="a").json
    assert kept["choices"][0]["text"].startswith("aa") and kept["choices"][0]["finish_reason"] == "stop"


def test_special_tokens_in_the_text(server):
    fields = {"allowed_token_ids": [USER], "max_tokens": 2}
    assert server.text(**fields).json["choices"][0]["text"] == ""
    assert server.text(**fields, skip_special_tokens=False).json["choices"][0]["text"] == "<|user|>" * 2
    ended = {"logit_bias": {str(EOS): 100}, "skip_special_tokens": False, "temperature": 0}
    assert server.text(**ended).json["choices"][0]["text"] == ""
    assert server.text(**ended, include_stop_str_in_output=True).json["choices"][0]["text"] == "<|end|>"


def test_bad_words_and_contradictions(server):  # P14
    fields = {"allowed_token_ids": [64, 65], "max_tokens": 12, "temperature": 1}
    assert all("a" not in server.text(**fields, bad_words=["a"], seed=s).json["choices"][0]["text"] for s in range(5))
    assert server.text(**fields, bad_words=["a", "b"]).status == 400


def test_tiny_temperatures_are_greedy(server):  # P04
    expected = server.text(temperature=0, max_tokens=8).json["choices"][0]["text"]
    for temperature in (1e-4, 1e-6, 1e-12, 5e-324):
        assert server.text(temperature=temperature, max_tokens=8).json["choices"][0]["text"] == expected


def test_penalties_leave_the_prompt_alone(server):  # P06
    fields = {"max_tokens": 1, "temperature": 0}
    plain = server.text("aaaa", **fields).json["choices"][0]["text"]
    assert server.text("aaaa", **fields, presence_penalty=2, frequency_penalty=2).json["choices"][0]["text"] == plain


@pytest.fixture(scope="module")
def named(tiny_model, tmp_path_factory):
    """Two names, a template with a variable, priorities, one row."""
    template = tmp_path_factory.mktemp("templates") / "variable.jinja"
    template.write_text("{{ style }}" + TEMPLATE)
    names = ("--served-model-name", "one", "--served-model-name", "two")
    options = ("--chat-template", str(template), "--scheduling", "priority", "--max-num-seqs", "1")
    with Server(serve_command(tiny_model, *names, *options)) as running:
        yield running


def test_names_of_the_model(named):
    assert [model["id"] for model in named.get("/v1/models").json["data"]] == ["one", "two"]
    assert named.chat(max_tokens=1).json["model"] == "one" == named.chat(max_tokens=1, model="one").json["model"]
    assert named.chat(max_tokens=1, model="two").json["model"] == "two"
    assert named.chat(max_tokens=1, model="tiny").status == 404 == named.get("/v1/models/three").status


def test_variables_of_the_template(named):
    def length(**more) -> int:
        return named.chat(max_tokens=1, **more).json["usage"]["prompt_tokens"]

    assert length(chat_template_kwargs={"style": "abcd"}) == length() + 4
    assert named.chat(chat_template_kwargs={"messages": []}, max_tokens=1).status == 400
    deep: object = 1
    for _ in range(900):
        deep = {"a": deep}
    refused = named.chat(chat_template_kwargs={"style": deep}, max_tokens=1)
    assert refused.status == 400 and "too deeply" in refused.message


def test_priorities_are_taken(named):
    texts = {named.text("abc", seed=1, max_tokens=6, priority=p).json["choices"][0]["text"] for p in (-5, 0, 1_000_000)}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("messages", [5, {}, [5], [{}], [{"role": 5}], [{"role": "user", "content": 5}],
                      [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]]),
        ("max_completion_tokens", [0, "5", 1.5]),
        ("logprobs", [1, "yes"]),
        ("top_logprobs", ["1", True]),
        ("n", [0, 129, "1"]),
        ("tools", ["x", [5]]),
        ("response_format", [5, {"type": "xml"}]),
        ("reasoning_effort", ["huge", 5]),
        ("chat_template_kwargs", [5, [1]]),
        ("add_generation_prompt", [1]),
        ("continue_final_message", ["no"]),
        ("parallel_tool_calls", ["no"]),
        ("include_reasoning", [1]),
        ("functions", [[{"name": "f"}]]),
        ("audio", [{"voice": "x"}]),
    ],
)  # fmt: skip
def test_wrong_values_in_chats_are_named(server, name, values):
    expected = fixed(server)
    for value in values:
        reply = server.post(
            CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "tools": [], name: value}
        )
        assert reply.status == 400 and reply.json["error"]["param"] == name, (value, reply.data)
    alive(server, expected)
