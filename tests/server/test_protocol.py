"""What bodies mean and what answers look like. S, P and C numbers are cases that engines in the field got wrong."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from harness import CHAT, TEXT, Server, alive, fixed, strict

ROUTES = (CHAT, TEXT, "/tokenize", "/detokenize")
MAX_LEN = 512  # of the tiny model


@pytest.fixture(scope="module")
def expected(server) -> bytes:
    return fixed(server)


# -- usage and finish reasons


def usages(events):
    return [(index, event["usage"]) for index, event in enumerate(events) if event.get("usage") is not None]


def test_usage_comes_last_and_only_when_asked_for(server):  # S01
    fields = {"temperature": 0, "max_tokens": 5, "stream": True}
    for options in ({}, {"stream_options": {}}, {"stream_options": None}):
        assert usages(server.chat(**fields, **options).events) == []
    events = server.chat(**fields, stream_options={"include_usage": True}).events
    whole = server.chat(temperature=0, max_tokens=5).json
    assert [(len(events) - 1, whole["usage"])] == [
        (index, {**usage, "prompt_tokens_details": whole["usage"]["prompt_tokens_details"]})
        for index, usage in usages(events)
    ]
    assert events[-1]["choices"] == []
    assert server.chat(max_tokens=1, stream_options={"include_usage": True}).status == 400
    assert server.chat(max_tokens=1, stream=True, stream_options={"include_usage": 1}).status == 400


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_finish_reasons_are_the_same_on_all_routes(server, reason):  # S02
    bias = {str(EOS): 100} if reason == "stop" else {str(EOS): -100}
    fields = {"temperature": 0, "max_tokens": 4, "logit_bias": bias}
    found = {server.chat(**fields).json["choices"][0]["finish_reason"]}
    found.add(server.text(**fields).json["choices"][0]["finish_reason"])
    for reply in (server.chat(**fields, stream=True), server.text(**fields, stream=True)):
        assert [reasons for _, reasons in reply.choices().values()] == [[reason]]
        found.add(reply.events[-1]["choices"][0]["finish_reason"])
    assert found == {reason}


EOS = 256  # the tiny tokenizer's first special token


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20])
def test_exactly_max_tokens(server, count):  # S03
    fields = {"ignore_eos": True, "max_tokens": count, "seed": 1}
    whole = server.text(**fields, logprobs=0).json
    usage = whole["usage"]
    assert usage["completion_tokens"] == count and usage["total_tokens"] == usage["prompt_tokens"] + count
    assert whole["choices"][0]["finish_reason"] == "length"
    assert {len(values) for values in whole["choices"][0]["logprobs"].values()} == {count}
    events = server.chat(
        **fields, logprobs=True, top_logprobs=1, stream=True, stream_options={"include_usage": True}
    ).events
    assert events[-1]["usage"]["completion_tokens"] == count
    told = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
    assert sum(len(each["content"]) for each in told) == count


def test_echo_of_the_prompt_alone(server, expected):  # S04
    fields = {"echo": True, "max_tokens": 0}
    prompt = "Two words\n and é"
    for stream in (False, True):
        for more in ({}, {"logprobs": 1}):
            reply = server.text(prompt, **fields, **more, stream=stream)
            assert reply.status == 200
            if stream:
                assert reply.choices() == {0: (prompt, ["length"])}
                continue
            choice, usage = reply.json["choices"][0], reply.json["usage"]
            assert (choice["text"], choice["finish_reason"], usage["completion_tokens"]) == (prompt, "length", 0)
            if more:
                assert len(choice["logprobs"]["tokens"]) == usage["prompt_tokens"]
                assert choice["logprobs"]["token_logprobs"][0] is None
    assert server.text(max_tokens=0).status == 400
    assert server.chat(max_tokens=0).status == 400
    alive(server, expected)


def test_echo_with_an_answer(server):
    reply = server.text("abc", echo=True, logprobs=2, max_tokens=3, temperature=0).json["choices"][0]
    plain = server.text("abc", max_tokens=3, temperature=0).json["choices"][0]
    assert reply["text"] == "abc" + plain["text"]
    logprobs = reply["logprobs"]
    assert logprobs["tokens"][:3] == ["a", "b", "c"] and len(logprobs["tokens"]) == 6
    assert logprobs["text_offset"][:4] == [0, 1, 2, 3]
    streamed = server.text("abc", echo=True, logprobs=2, max_tokens=3, temperature=0, stream=True)
    assert streamed.choices()[0][0] == reply["text"]


# -- logprobs


def test_zero_logprobs_is_a_request(server):  # S06
    choice = server.text(logprobs=0, max_tokens=2).json["choices"][0]
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])
    content = server.chat(logprobs=True, top_logprobs=0, max_tokens=2).json["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"] == [] and content[0]["logprob"] <= 0 and content[0]["bytes"]
    assert server.chat(top_logprobs=2, max_tokens=2).status == 400
    assert server.text(logprobs=-1).status == 400
    assert server.text(max_tokens=1).json["choices"][0]["logprobs"] is None


def test_no_infinity_reaches_json(server, expected):  # P10
    for body in (
        {"echo": True, "logprobs": 5, "top_k": 1, "temperature": 1},
        {"logprobs": 5, "allowed_token_ids": [5, 6]},
        {"logprobs": 5, "logit_bias": {str(token): -100 for token in range(260) if token != 7}},
    ):
        choice = server.text("abc", max_tokens=4, **body).json["choices"][0]
        for token, value, top in zip(
            choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"],
            strict=True,
        ):  # fmt: skip
            if value is not None:
                assert value <= 1e-6 and top[token] == value
                assert list(top.values()) == sorted(top.values(), reverse=True)
    alive(server, expected)


# -- bodies


@pytest.mark.parametrize("path", ROUTES)
def test_bodies_that_are_no_objects(server, expected, path):  # S08
    bodies = [b"[]", b"null", b"1", b'"x"', b"{", b"", b'{"model": "\xff"}', b'{"temperature": NaN}', b"{}"]
    bodies += [b"[" * 20_000 + b"]" * 20_000, b'{"prompt": ' * 5_000 + b"1" + b"}" * 5_000, b'{"n": 1e999}']
    for body in bodies:
        reply = server.ask("POST", path, body)
        assert 400 <= reply.status < 500 and reply.message, body[:20]
    form = server.ask("POST", path, b"a=b", {"content-type": "application/x-www-form-urlencoded"})
    assert form.status == 415 and form.message
    assert server.ask("POST", path, b"{}", {}).status == 400  # no content type: taken for JSON
    assert server.ask("GET", path).status == 405
    alive(server, expected)


def test_empty_prompts_and_ids_outside_the_vocabulary(server, expected):  # S09
    assert server.post(CHAT, messages=[]).status == 400
    for prompt in ([], [[]], [-1], [260], [2**40], [2**70], [True], [1.5], [None], {}, "", ["a", 1], [[1], ["a"]]):
        reply = server.text(prompt, max_tokens=1)
        assert reply.status == 400 and reply.message, prompt
    assert server.text([259], max_tokens=1).status == 200
    alive(server, expected)


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_that_refuses(server, expected, stream):  # S10
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    reply = server.post(CHAT, messages=messages, stream=stream)
    assert reply.status == 400 and "roles must alternate" in reply.message
    alive(server, expected)


def test_unknown_fields_are_ignored_and_named(server):
    reply = server.text(max_tokens=1, shape="round", temprature=3, user="me")
    assert reply.status == 200 and reply.headers["x-headrace-ignored"] == "shape, temprature"
    assert "x-headrace-ignored" not in server.text(max_tokens=1).headers
    odd = server.text(max_tokens=1, **{"": 1, "\r\nx: y ": 1, "é": 1})
    assert odd.status == 200 and odd.headers["x-headrace-ignored"] == "?, ??x:?y?, ?"


def test_parameters_that_leave_no_token(server):
    pytest.importorskip("llguidance")
    for stream in (False, True):
        reply = server.text(allowed_token_ids=[64], guided_choice=["b"], max_tokens=3, stream=stream)
        assert reply.status == 400 and "no token is allowed" in reply.message


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", ["warm", [1], -0.1, True, 1e300]),
        ("top_p", [-1, 1.0001, "1", 0]),
        ("min_p", [2, "x"]),
        ("repetition_penalty", [0, -1]),
        ("seed", [2**64, 2**63, -(2**63) - 1, "7", 1.5]),
        ("max_tokens", [-1, 10**18, 1.5, "3"]),
        ("n", [0, 5_000_000, "2", 1.0]),
        ("best_of", [5_000_000, 0]),
        ("stop", [["x"] * 100_000, [""], 5, [None]]),
        ("stop_token_ids", [[10**9], [-1], "5"]),
        ("logit_bias", [{"260": 1}, {"-1": 1}, {"abc": 1}, {"5": "x"}, {"5": 1e9}, {"5": None}, [5]]),
        ("stream", ["yes", 1]),
        ("echo", [1, "true"]),
        ("priority", ["high", 2**40, 1.5]),
        ("cache_salt", [5, "x" * 300]),
        ("timeout", [0, -1, "5", 1e300]),
        ("logprobs", [10**9, 21, "1", True]),
        ("stream_options", [5, [1]]),
        ("model", [5, ["tiny"]]),
    ],
)
def test_wrong_values_are_named(server, expected, name, values):  # P07, P09, S17
    for value in values:
        started = time.monotonic()
        reply = server.text(**{"max_tokens": 2, "min_tokens": 2, "stream": name == "stream_options", name: value})
        assert reply.status == 400 and name in reply.message, (value, reply.data)
        assert reply.json["error"]["param"] in (name, None) and time.monotonic() - started < 1
    alive(server, expected)


def test_controls_of_wrong_values(server):
    for seed in (2**63 - 1, 0, -1, -(2**63)):
        one, two = (server.text(seed=seed, max_tokens=6, temperature=1.2).json["choices"] for _ in range(2))
        assert one == two
    for name, value in (("top_logprobs", 10**9), ("top_logprobs", 21), ("n", 0)):
        assert server.chat(**{name: value, "logprobs": True}, stream=True).status == 400


def test_large_requests_cost_no_memory(server, expected):  # S17
    def resident() -> int:
        pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
        return pages * 4096

    before = resident()
    for body in ({"n": 5_000_000}, {"best_of": 10**9}, {"stop": ["x"] * 100_000}, {"prompt": ["a"] * 100_000}):
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 1, **body}).status == 400
    assert resident() - before < 50 << 20
    alive(server, expected)


# -- choices and lengths


def test_prompts_times_choices(server):  # S15
    body = {"prompt": ["red", "blue sky"], "n": 2, "echo": True, "temperature": 1, "seed": 7, "max_tokens": 8}
    for _ in range(3):
        whole = server.post(TEXT, body).json
        texts = [choice["text"] for choice in whole["choices"]]
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        assert all(text.startswith(body["prompt"][index // 2]) for index, text in enumerate(texts))
        streamed = server.post(TEXT, body, stream=True, stream_options={"include_usage": True})
        assert [streamed.choices()[index][0] for index in range(4)] == texts
        assert all(len(reasons) == 1 for _, reasons in streamed.choices().values())
        assert streamed.events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert whole["usage"]["prompt_tokens"] == len("red") + len("blue sky")


def test_one_choice_ends_early(server):
    body = {"prompt": "abc", "n": 3, "temperature": 1.5, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    full = [choice["text"] for choice in server.post(TEXT, body).json["choices"]]
    stop = full[1][4:6]
    cut = server.post(TEXT, body, stop=stop, stream=True).choices()
    assert cut[1] == (full[1][: full[1].index(stop)], ["stop"])
    kept = server.post(TEXT, body, stop=stop, include_stop_str_in_output=True).json["choices"][1]
    assert kept["text"] == full[1][: full[1].index(stop) + len(stop)]


def test_best_of_and_beams(server):
    whole = server.text(n=2, best_of=4, max_tokens=4, seed=1).json
    assert len(whole["choices"]) == 2 and whole["usage"]["completion_tokens"] >= 8
    streamed = server.text(n=2, best_of=4, max_tokens=4, seed=1, stream=True).choices()
    assert [streamed[index][0] for index in range(2)] == [choice["text"] for choice in whole["choices"]]
    beams = server.text("hello", n=2, beam_width=3, temperature=0, max_tokens=4).json["choices"]
    assert beams[0]["text"] != beams[1]["text"]


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"max_completion_tokens": 4}, 4),
        ({"max_completion_tokens": 4, "max_tokens": 9}, 4),
        ({"max_tokens": 9}, 9),
    ],
)
def test_max_completion_tokens_goes_first(server, fields, count):  # S16
    whole = server.chat(ignore_eos=True, **fields).json
    assert whole["usage"]["completion_tokens"] == count and whole["choices"][0]["finish_reason"] == "length"


def test_prompts_at_the_limit(server, expected):  # C09
    def ask(length: int, **fields: object):
        started = time.monotonic()
        reply = server.text([5] * length, ignore_eos=True, **fields)
        assert time.monotonic() - started < 5
        return reply

    for fields in ({"max_tokens": 1}, {"max_tokens": 50}):
        choice = ask(MAX_LEN - 1, **fields).json
        assert choice["usage"]["completion_tokens"] == 1 and choice["choices"][0]["finish_reason"] == "length"
    for length in (MAX_LEN, MAX_LEN + 1):
        reply = ask(length, max_tokens=1)
        assert reply.status == 400 and str(length) in reply.message and str(MAX_LEN) in reply.message
        assert reply.json["error"]["code"] == "context_length_exceeded"
    assert ask(MAX_LEN, max_tokens=0, echo=True).status == 200
    assert ask(MAX_LEN, max_tokens=0, echo=True, logprobs=1).status == 400
    assert ask(MAX_LEN - 10, max_tokens=11).json["usage"]["completion_tokens"] == 10
    alive(server, expected)


# -- sampling through HTTP


def test_seeds(server):  # P08
    fields = {"temperature": 1.2, "max_tokens": 12}
    one, two = ([c["text"] for c in server.text(seed=5, n=4, **fields).json["choices"]] for _ in range(2))
    assert one == two and len(set(one)) > 1
    assert len({server.text(**fields).json["choices"][0]["text"] for _ in range(5)}) > 1


def test_logit_bias_excludes_and_forces(server):  # P09
    fields = {"temperature": 0, "max_tokens": 4, "logprobs": 0, "return_tokens_as_token_ids": True, "ignore_eos": True}
    plain = server.text("abc", **fields).json["choices"][0]["logprobs"]["tokens"]
    first = plain[0].removeprefix("token_id:")
    without = server.text("abc", **fields, logit_bias={first: -100}).json["choices"][0]["logprobs"]["tokens"]
    assert plain[0] not in without
    forced = server.text("abc", **fields, logit_bias={"9": 100}).json["choices"][0]["logprobs"]["tokens"]
    assert forced == ["token_id:9"] * 4
    assert server.text("abc", **fields).json["choices"][0]["logprobs"]["tokens"] == plain


def test_chat_continues_a_message(server):
    messages = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "b"}, {"role": "assistant", "content": "Yes"},
    ]  # fmt: skip
    body = {"messages": messages, "continue_final_message": True}
    assert server.post("/tokenize", body).json["count"] == len("aYesbYes") + 7
    assert server.post(CHAT, body, max_tokens=1).status == 200
    assert server.post(CHAT, body, add_generation_prompt=True).status == 400
    assert server.post(CHAT, messages=messages[:1], continue_final_message=True).status == 400
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    assert server.post(CHAT, messages=image).status == 400


def test_chunks_are_strict_json(server):
    reply = server.chat(stream=True, max_tokens=30, temperature=1.5, seed=2)
    assert reply.headers["content-type"] == "text/event-stream" and reply.events
    assert strict(server.chat(max_tokens=3).data)["object"] == "chat.completion"
    assert all(event["object"] == "chat.completion.chunk" for event in reply.events)


def test_other_texts_are_not_disturbed_by_refusals(server: Server):  # P07: while another stream is running
    body = {"max_tokens": 60, "seed": 4, "temperature": 1, "ignore_eos": True}
    expected = server.text(**body).json["choices"][0]["text"]
    with server.open(TEXT, {"prompt": "hi", "stream": True, **body}) as connection:
        for _ in range(10):
            assert server.text(top_p=-1).status == 400
            assert server.text(logit_bias={"260": 1}).status == 400
        data = b""
        while b"[DONE]" not in data:
            data += connection.recv(65536)
    pieces = [line for line in data.decode().splitlines() if line.startswith("data: {")]
    assert "".join(strict(piece[6:])["choices"][0]["text"] for piece in pieces) == expected
