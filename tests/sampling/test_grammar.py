"""Structured output through the engine, on a tiny model with random weights: whatever it likes, the form holds."""

from __future__ import annotations

import json
import re
import time

import pytest

pytest.importorskip("llguidance")

from headrace import LLM, SamplingParams
from headrace.core.request import RequestError
from headrace.sampling.params import Grammar
from tiny import write_tiny_llama


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(path):
    with LLM(str(path)) as llm:
        yield llm


def schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def answer(llm: LLM, grammar: Grammar, **fields) -> str:
    params = SamplingParams(grammar=grammar, max_tokens=fields.pop("max_tokens", 200), **fields)
    (choice,) = llm.generate("abc", params)[0].outputs
    assert choice.finish_reason == "stop", choice
    return choice.text


def closed(properties: dict[str, object]) -> Grammar:
    required = list(properties)
    return schema({"type": "object", "properties": properties, "required": required, "additionalProperties": False})


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize(
    ("value", "check"),
    [
        ({"type": "integer", "minimum": -5, "maximum": 12}, lambda v: -5 <= v <= 12),
        ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5}, lambda v: v == 4),
        ({"type": "string", "pattern": "^[0-9]{3}$"}, lambda v: re.fullmatch("[0-9]{3}", v)),
        ({"type": "string", "maxLength": 3}, lambda v: len(v) <= 3),
        ({"type": "boolean"}, lambda v: isinstance(v, bool)),
        ({"const": {"a": [1, None, True]}}, lambda v: v == {"a": [1, None, True]}),
        ({"enum": ["é", "日本", 'a"b', "\n", "🦙"]}, lambda v: v in ["é", "日本", 'a"b', "\n", "🦙"]),
    ],
)
def test_schemas_hold(llm, value, check, temperature):  # G07
    for seed in range(3):
        assert check(json.loads(answer(llm, schema(value), temperature=temperature, seed=seed)))


@pytest.mark.parametrize("word", ["é", "日本", 'a"b', "\\n", "🦙", "a b", "a|b"])
def test_choices_are_written_out(llm, word):
    assert answer(llm, Grammar("choice", json.dumps([word])), temperature=1.0) == word


def test_each_choice_can_be_forced(llm):
    choices = Grammar("choice", json.dumps(["red", "blue"]))
    for word, banned in (("red", "b"), ("blue", "r")):
        bias = {llm.engine.tokenizer.token_id(banned): -100.0}
        assert answer(llm, choices, temperature=0, logit_bias=bias) == word


def test_regular_expressions_and_grammars(llm):
    for seed in range(3):
        assert re.fullmatch("[a-f]{4}-[0-9]{2}", answer(llm, Grammar("regex", "[a-f]{4}-[0-9]{2}"), seed=seed))
    assert answer(llm, Grammar("grammar", 'start: "x" y "z"\ny: "1" | "2"\n'), temperature=0) in ("x1z", "x2z")


def test_blanks_come_to_an_end(llm):  # G08
    bias = {llm.engine.tokenizer.encode(blank)[0]: 100.0 for blank in (" ", "\n")}
    text = answer(llm, closed({"ok": {"type": "boolean"}}), logit_bias=bias, max_tokens=80, temperature=0)
    assert isinstance(json.loads(text)["ok"], bool) and text.rstrip().endswith("}")
    assert max(map(len, re.findall(r"\s+", text))) <= 8


FIELDS = {"temperature": 1.3, "seed": 5, "max_tokens": 60}
FORM = closed({"a": {"type": "integer", "minimum": 0, "maximum": 10**6}, "b": {"enum": ["x", "yy", "日本"]}})


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"steps_in_flight": 3},
        {"max_num_seqs": 2},
        {"speculate": "ngram"},
        {"kv_cache": 24 * 16 * 2 * 2 * 2 * 12 * 2, "max_model_len": 100},
    ],
)
def test_no_schedule_changes_an_answer(llm, path, options):  # G09
    """Among others, with drafts (which are wrong under the grammar more often than not), after preemptions."""
    prompts = ["abcabcabc", "hello", "0,1,2", "{}{}{}", "xxxx", "é"]
    params = [SamplingParams(**FIELDS, grammar=FORM if i % 2 else None, n=1 + i % 2) for i in range(len(prompts))]
    expected = [
        [choice.text for choice in llm.generate(*each)[0].outputs] for each in zip(prompts, params, strict=True)
    ]
    with LLM(str(path), **options) as other:
        found = [[choice.text for choice in output.outputs] for output in other.generate(prompts, params)]
    assert found == expected
    for texts in expected[1::2]:
        assert all(json.loads(text)["b"] in ("x", "yy", "日本") for text in texts)


def test_truncation_and_bans_keep_the_form(llm):
    for fields in (
        {"top_k": 1},
        {"top_p": 0.01},
        {"min_p": 1.0},
        {"repetition_penalty": 5.0},
        {"frequency_penalty": 2.0},
    ):
        json.loads(answer(llm, FORM, temperature=1, seed=1, **fields))
    nine = llm.engine.tokenizer.encode("9")[0]
    params = SamplingParams(grammar=Grammar("regex", "[0-9]"), allowed_token_ids=(nine + 30,))
    (choice,) = llm.generate("abc", params)[0].outputs
    assert choice.finish_reason == "error" and "grammar" in choice.error


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"$ref": "#/missing"}), "missing"),
        (schema({"$ref": "http://127.0.0.1/x"}), "127.0.0.1"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), ""),
        (schema({"type": "string", "minLength": 5, "maxLength": 3}), ""),
        (schema({"type": "bogus"}), "bogus"),
        (schema({"$ref": "#"}), "no text can begin"),
        (Grammar("regex", r"[^\s\S]"), "no text can begin"),
        (Grammar("json_schema", "[1]"), ""),
        (Grammar("json_schema", '"x"'), ""),
        (Grammar("regex", "("), "unclosed"),
        (Grammar("grammar", 'start: "a"\nstart: "b"\n'), "duplicate"),
        (Grammar("grammar", "start: missing\n"), "missing"),
        (Grammar("json_schema", '{"items":' * 2000 + "{}" + "}" * 2000), ""),
    ],
)
def test_what_cannot_be_used_is_refused(llm, grammar, words):  # G05, G06
    with pytest.raises(RequestError) as refusal:
        llm.generate("abc", SamplingParams(grammar=grammar))
    assert words in str(refusal.value)
    json.loads(answer(llm, FORM, seed=1))


AMBIGUOUS = Grammar("grammar", 'start: e\ne: e e e | "a" | "b" e\n')


def test_a_grammar_that_takes_too_long_ends_its_request_alone(llm, monkeypatch):
    """Each token doubles the ways to read the text, and the others of a step wait for all of them to be looked at."""
    other = SamplingParams(grammar=FORM, seed=1, max_tokens=200)
    expected = llm.generate("abc", other)[0].outputs[0].text
    monkeypatch.setattr("headrace.sampling.grammar.WORK", 0.1)
    monkeypatch.setattr("headrace.sampling.grammar.WORK_A_MASK", 0.001)
    endless = SamplingParams(grammar=AMBIGUOUS, temperature=0, min_tokens=600, max_tokens=600)
    began = time.thread_time()
    outputs = llm.generate(["abc", "abc"], [endless, other])
    (long,), (short,) = outputs[0].outputs, outputs[1].outputs
    assert long.finish_reason == "error" and "ambiguous" in long.error
    assert short.finish_reason == "stop" and short.text == expected
    assert time.thread_time() - began < 20


def test_a_grammar_that_cannot_be_followed_further_is_no_end(llm):
    """The library gives up on such a text; that must not look as if it had come to its end."""
    grammar = Grammar("regex", "(.*a.{1,400}b.{1,400}){9}c")
    bias = {llm.engine.tokenizer.token_id(letter): 30.0 for letter in "ab"}
    params = SamplingParams(grammar=grammar, temperature=1.0, seed=1, max_tokens=300, logit_bias=bias)
    (choice,) = llm.generate("abc", params)[0].outputs
    assert choice.finish_reason == "error" and "grammar" in choice.error


def test_options_that_exclude_a_grammar():
    for fields in ({"ignore_eos": True}, {"beam_width": 2, "temperature": 0}):
        with pytest.raises(ValueError, match="grammar"):
            SamplingParams(grammar=FORM, **fields)
    with pytest.raises(ValueError, match="grammar"):
        Grammar("xml", "")  # type: ignore[arg-type]
