"""Parsers of every form of calls and reasoning, on text in pieces of any size."""

from __future__ import annotations

import json
import time

import pytest

from headrace.server.parsers.base import PlainParser, joined_calls
from headrace.server.parsers.harmony import Harmony
from headrace.server.parsers.hermes import CLOSE, OPEN, Hermes
from headrace.server.parsers.llama import TAG, Llama, code_call
from headrace.server.parsers.mistral import Mistral
from headrace.server.parsers.thinking import Beginning, Thinking, ThinkingParser
from headrace.server.parsers.tools import Tools

CITY = '{"city":"東京","note":"é😀 } ] \\" </tool_call> [TOOL_CALLS]","n":[1,{"a":null}]}'
HIDDEN = frozenset({TAG, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"})


def tools(parallel: bool = True, names: tuple[str, ...] = ("f", "g")) -> Tools:
    return Tools(tuple({"type": "function", "function": {"name": name}} for name in names), (), parallel)


def read(parser, text: str, size: int):
    """(content, reasoning, [(name, arguments)]) of a text fed in pieces of `size`."""
    content, reasoning, calls = "", "", []
    for start in range(0, len(text), size):
        pieces = parser.feed(text[start : start + size])
        content, reasoning, calls = content + pieces.content, reasoning + pieces.reasoning, calls + pieces.calls
    pieces = parser.finish()
    whole = joined_calls(calls + pieces.calls)
    named = [(each["function"]["name"], each["function"]["arguments"]) for each in whole]
    assert (
        parser.num_calls == len(named)
        and [c["index"] for c in calls if "id" in c] == list(range(len(named)))[: len(calls)]
    )
    return content + pieces.content, reasoning + pieces.reasoning, named


def call(name: str, arguments: str, gap: str = "\n") -> str:
    return f'{OPEN}{gap}{{"name": "{name}", "arguments": {arguments}}}{gap}{CLOSE}'


SIZES = [1, 2, 3, 7, 1000]
HERMES = [
    ("plain text < and <tool", "plain text < and <tool", []),
    (" blanks \n", " blanks \n", []),
    (call("f", CITY), "", [("f", CITY)]),  # X03
    (call("f", "{}", ""), "", [("f", "{}")]),
    ("I call.\n" + call("f", CITY) + "\n" + call("g", "{}") + "\n", "I call.", [("f", CITY), ("g", "{}")]),
    (call("f", "{}") + " and then", " and then", [("f", "{}")]),
    (OPEN + '{"arguments": {"a": "\\u00e9"}, "name": "f"}' + CLOSE, "", [("f", '{"a": "é"}')]),
    (OPEN + '{"name": "f"}' + CLOSE, "", [("f", "{}")]),
    (OPEN + '{"name": "f", "arguments": "{\\"a\\": 1}"}' + CLOSE, "", [("f", '{"a": 1}')]),
    (OPEN + '{"name": "f", "arguments": {}} \n', "", [("f", "{}")]),  # the closing tag is missing
    (OPEN + '{"name": "f"' + CLOSE + call("g", "{}"), OPEN + '{"name": "f"' + CLOSE, [("g", "{}")]),
    (OPEN + "no json" + CLOSE + " x", OPEN + "no json" + CLOSE + " x", []),
    ("a " + OPEN + "[1]" + CLOSE, "a " + OPEN + "[1]" + CLOSE, []),
    ("a \n" + OPEN + '{"name": ', "a \n" + OPEN + '{"name": ', []),
    (OPEN + '{"name": "f", "arguments": {"a": [1', "", [("f", '{"a": [1')]),  # cut by max_tokens
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("text", "content", "calls"), HERMES)
def test_hermes(text, content, calls, size):
    assert read(Hermes().parser(tools(), HIDDEN), text, size) == (content, "", calls)


def llama_call(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


LLAMA = [
    ("plain { text", "plain { text", []),
    (llama_call("f", CITY), "", [("f", CITY)]),
    ("\n" + llama_call("f", "{}"), "", [("f", "{}")]),
    (TAG + llama_call("f", CITY), "", [("f", CITY)]),
    (llama_call("f", "{}") + "; " + llama_call("g", CITY), "", [("f", "{}"), ("g", CITY)]),
    (llama_call("f", "{}") + "\n" + llama_call("g", "{}") + "\n", "", [("f", "{}"), ("g", "{}")]),
    ('{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ('{"parameters": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
    (llama_call("other", "{}"), llama_call("other", "{}"), []),  # JSON that is no call of a tool
    ('{"name": "Bob", "age": [1, {"x": 2}]} .', '{"name": "Bob", "age": [1, {"x": 2}]} .', []),
    (
        '{"age": 3, "city": "a long one that goes on and on and on"',
        '{"age": 3, "city": "a long one that goes on and on and on"',
        [],
    ),
    ("{ no json", "{ no json", []),
    (TAG + 'f.call(query="é \\" )", n=[1, 2])', "", [("f", '{"query": "é \\" )", "n": [1, 2]}')]),
    (TAG + "print(1)\nx = 2", "print(1)\nx = 2", []),
    (TAG + "f.call(1, *x)", "f.call(1, *x)", []),
    (TAG + "f.called()", "f.called()", []),
    (llama_call("f", '{"a": 1}')[:-5], "", [("f", '{"a"')]),
    ("I call " + TAG + llama_call("f", "{}"), "I call", [("f", "{}")]),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("text", "content", "calls"), LLAMA)
def test_llama(text, content, calls, size):
    assert read(Llama().parser(tools(), HIDDEN), text, size) == (content, "", calls)


def test_calls_as_code():
    assert code_call('search.call(query="x")') == ("search", '{"query": "x"}')
    for code in (
        "search(query=1)",
        "s.call(x)",
        "s.call(a=b)",
        "s.call(**{})",
        "s.call(a=1)(b)",
        "s.call(" + "[" * 9999,
    ):
        assert code_call(code) is None


T = "[TOOL_CALLS]"
MISTRAL = [
    ("plain [TOOL", "plain [TOOL", []),
    (T + f'[{{"name": "f", "arguments": {CITY}}}]', "", [("f", CITY)]),
    (
        T + ' [{"name": "f", "arguments": {}}, {"arguments": {"a": 1}, "name": "g"}]',
        "",
        [("f", "{}"), ("g", '{"a": 1}')],
    ),
    (T + f"f[ARGS]{CITY}" + T + 'g{"a": 1}', "", [("f", CITY), ("g", '{"a": 1}')]),
    (T + "f[CALL_ID]abcdefghi[ARGS]{}", "", [("f", "{}")]),
    ("I call.\n" + T + "f[ARGS]{}", "I call.", [("f", "{}")]),
    ("a " + T + "no call", "a no call", []),
    (T + "f" + T + "g[ARGS]{}", "f", [("g", "{}")]),
    (T + "[1]", "[1]", []),
    (T + '[{"name": "f", "arguments": {"a": "', "", [("f", '{"a": "')]),
    (T + 'f[ARGS]{"a": [', "", [("f", '{"a": [')]),
    (T + "f[ARGS]{} then", " then", [("f", "{}")]),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("text", "content", "calls"), MISTRAL)
def test_mistral(text, content, calls, size):
    assert read(Mistral().parser(tools(), HIDDEN), text, size) == (content, "", calls)


def test_ids_that_the_templates_of_mistral_take():
    pieces = Mistral().parser(tools(), HIDDEN).feed(T + "f[ARGS]{}")
    assert len(pieces.calls[0]["id"]) == 9 and pieces.calls[0]["id"].isalnum()


THOUGHT = "<|channel|>analysis<|message|>I think < 3<|end|><|start|>assistant"
HARMONY = [
    ("<|channel|>final<|message|>Hello <|x", "Hello <|x", "", []),
    (THOUGHT + "<|channel|>final<|message|>Hello<|return|>", "Hello", "I think < 3", []),
    (
        THOUGHT + f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{CITY}<|call|>",
        "",
        "I think < 3",
        [("f", CITY)],
    ),
    (
        THOUGHT
        + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.g<|channel|>commentary "
        "json<|message|>{}<|call|>",
        "I look.",
        "I think < 3",
        [("g", "{}")],
    ),
    ("<|channel|>commentary to=f<|message|>{}", "", "", [("f", "{}")]),
    ("<|channel|>analysis to=python<|message|>1+1<|call|>", "", "1+1", []),
    ("<|channel|>analysis<|message|>cut", "", "cut", []),
    ("no header", "no header", "", []),
    ("<|channel|>fin", "", "", []),  # a header that was cut short
    (THOUGHT + THOUGHT + "<|channel|>final<|message|>x", "x", "I think < 3\nI think < 3", []),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), HARMONY)
def test_harmony(text, content, reasoning, calls, size):
    assert read(Harmony().parser(tools(), HIDDEN), text, size) == (content, reasoning, calls)


def test_harmony_goes_on_with_a_message():
    form = Harmony()
    begun = form.begun("<|start|>user<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>The an")
    assert read(form.parser(None, HIDDEN, begun), "swer<|return|>", 3) == ("swer", "", [])
    assert form.begun("<|start|>user<|message|>a<|end|>") == ""


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (Hermes(), call("f", "{}") + call("g", "{}")),
        (Llama(), llama_call("f", "{}") + ";" + llama_call("g", "{}")),
        (Mistral(), T + "f[ARGS]{}" + T + "g[ARGS]{}"),
    ],
)
def test_one_call_at_most(form, text):
    assert read(form.parser(tools(parallel=False), HIDDEN), text, 3) == ("", "", [("f", "{}")])


LONG = {
    "hermes": [
        OPEN * 50_000,
        OPEN + '{"name": "f", "x": [' + "[" * 500_000,
        OPEN + '{"name": "f' + "\\" * 500_000,
        "<" * 500_000,
        (OPEN + "x" + CLOSE) * 20_000,
        " " * 500_000,
        "[f(" + ", ".join(f"a{i}=1" for i in range(40)),
    ],
    "llama": [
        '{"name": "' + "x" * 500_000,
        '{"parameters": ' + "[" * 500_000,
        "{" * 500_000,
        "[f(" + ", ".join(f"a{i}=1" for i in range(40)) + ")]",
        "<|python" * 50_000,
    ],
    "mistral": ["[TOOL_CALL" * 50_000, "[" * 500_000],
    "harmony": ["<|" * 250_000, "<|channel|>" * 50_000],
}


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in LONG.items() for text in texts])
def test_long_texts_take_no_time(form, text):  # X04
    made = {"hermes": Hermes(), "llama": Llama(), "mistral": Mistral(), "harmony": Harmony()}[form]
    started = time.perf_counter()
    for size in (len(text), 16):
        assert read(made.parser(tools(), HIDDEN), text, size) == (text, "", [])
    assert time.perf_counter() - started < 5


THINK = Thinking("<think>", "</think>")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("beginning", "text", "content", "reasoning", "calls"),
    [
        (Beginning.FREE, "<think>\nI am\n\nhere.\n</think>\n\nYes. \n", "Yes. \n", "I am\n\nhere.", []),
        (Beginning.FREE, " \n<think></think>Yes", "Yes", "", []),
        (Beginning.FREE, " Yes <think> no", " Yes <think> no", "", []),
        (Beginning.FREE, " <thin", " <thin", "", []),
        (Beginning.FREE, "", "", "", []),
        (Beginning.OPEN, "I am</think>Yes", "Yes", "I am", []),
        (Beginning.OPEN, "I am < here </thi", "", "I am < here </thi", []),
        (Beginning.OPEN, "a</think>\n" + call("f", CITY), "", "a", [("f", CITY)]),
        (Beginning.OPEN, call("f", "{}") + "</think>x", "x", call("f", "{}"), []),
        (Beginning.ANSWER, "Yes </think>", "Yes </think>", "", []),
        (Beginning.OPEN, "a</think>\n</think>\n\nYes </think>", "Yes </think>", "a", []),
        (Beginning.OPEN, "a</think></think>\n" + call("f", CITY), "", "a", [("f", CITY)]),
        (Beginning.OPEN, "a</think> </thin", "</thin", "a", []),
        (Beginning.ANSWER, "\n</think>\n\nYes", "Yes", "", []),
        (Beginning.ANSWER, " \n</thing> Yes", " \n</thing> Yes", "", []),
        (Beginning.ANSWER, " ", " ", "", []),
        (Beginning.ANSWER, " " * 500 + "</think>", " " * 500 + "</think>", "", []),
    ],
)
def test_thinking(beginning, text, content, reasoning, calls, size):
    inner = Hermes().parser(tools(), HIDDEN) if calls else PlainParser()
    assert read(ThinkingParser(THINK, beginning, inner), text, size) == (content, reasoning, calls)


def test_how_a_prompt_leaves_the_answer():
    assert THINK.beginning("<|assistant|><think>\n", False) == Beginning.OPEN
    assert THINK.beginning("<|assistant|><think>\n\n</think>\n\n", False) == Beginning.ANSWER
    assert THINK.beginning("say <think>.<|assistant|>", False) == Beginning.FREE
    assert THINK.beginning("<|assistant|><think>so", True) == Beginning.OPEN
    assert THINK.beginning("<|assistant|>so", True) == Beginning.ANSWER


@pytest.mark.parametrize(
    ("form", "text", "name"),
    [
        (Hermes(), OPEN + '{"nam', ""),
        (Llama(), '{"name": "f', ""),
        (Mistral(), T + "f", ""),
        (Mistral(), T + '[{"name"', ""),
        (Hermes(), call("f", "{}") + "\n" + OPEN + '\n{"name', "f"),
    ],
)
def test_forced_calls_cut_short_are_no_content(form, text, name):
    forced = Tools(tools().definitions, ("f",), True)
    content, _, calls = read(form.parser(forced, HIDDEN), text, 3)
    assert not content.strip() and [each for each, _ in calls] == [name] * bool(name)
    assert name or read(form.parser(tools(), frozenset()), text, 3)[0] == text


def test_escapes_are_kept_as_they_were_written():  # X03
    arguments = '{"city":"\\u6771\\u4eac","note":"\\u00e9"}'
    for size in SIZES:
        ((_, found),) = read(Hermes().parser(tools(), HIDDEN), call("f", arguments), size)[2]
        assert found == arguments and json.loads(found)["city"] == "東京"
