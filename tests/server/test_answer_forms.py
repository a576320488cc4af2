"""Grammars of whole answers: whatever they allow, the form's own parser reads as it should. Random walks, no model."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

pytest.importorskip("llguidance")

from headrace.frontend.tokenizer import Tokenizer
from headrace.sampling.grammar import GrammarCompiler
from headrace.sampling.params import Grammar, SamplingParams
from headrace.server.errors import ApiError
from headrace.server.parsers.base import joined_calls
from headrace.server.parsers.form import AnswerForm
from headrace.server.parsers.tools import Tools
from tiny import write_tiny_llama

EOS = "<|return|>"

SPECIAL = (
    "<|end|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|call|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<think>",
    "</think>",
    "<tool_call>",
)
SOURCES = {
    "hermes": "<tool_call>",
    "llama": "<|python_tag|>",
    "mistral-list": "[TOOL_CALLS]",
    "mistral-named": "[TOOL_CALLS] [ARGS]",
    "harmony": "<|channel|> <|message|>",
}
PARAMETERS = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "s": {"enum": ["é", "日"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
OK = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
ANSWER = Grammar("json_schema", json.dumps(OK))


@pytest.fixture(scope="module", params=["tokens", "text"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    """A vocabulary that has the tags as tokens, and one that spells them; harmony's are always tokens."""
    special = SPECIAL if request.param == "tokens" else SPECIAL[:6]
    return Tokenizer.from_folder(
        write_tiny_llama(tmp_path_factory.mktemp("m") / request.param, special=special, eos=EOS)
    )


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.to_json, tokenizer.vocab_size, [tokenizer.eos_token_id])


def tools(choice: str | None = None, parallel: bool = True, strict: bool = False) -> Tools:
    definitions = tuple(
        {"type": "function", "function": {"name": name, "parameters": PARAMETERS, "strict": strict}}
        for name in ("first", "second")
    )
    forced = {None: (), "required": ("first", "second")}.get(choice, (choice,))
    return Tools(definitions, forced, parallel)


def walk(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, seed: int) -> list[int]:
    """Random tokens that the grammar allows, to its end; the end of anything is likelier than more of it."""
    matcher, chosen = compiler.matcher(grammar), random.Random(seed)
    ends = {tokenizer.token_id(each) for each in ('"', "}", *SPECIAL, EOS)} - {None}
    found: list[int] = []
    bits = np.zeros((tokenizer.vocab_size + 31) // 32, np.int32)
    words = [
        tokenizer.encode(word, add_special=False)
        for word in ("</think>", "<tool_call>", "<think>", "analysis", "final")
    ]
    while len(found) < 2000:
        word = chosen.choice(words) if chosen.random() < 0.1 else []
        if word and matcher.validate_tokens(word) == len(word):
            assert matcher.try_consume_tokens(word) == len(word)
            found += word
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        allowed = (
            np.unpackbits(bits.view(np.uint8), count=tokenizer.vocab_size, bitorder="little").nonzero()[0].tolist()
        )
        special = [token for token in allowed if token in ends]
        token = chosen.choice(special if special and chosen.random() < 0.2 else allowed)
        if token == tokenizer.eos_token_id:
            return found
        assert matcher.try_consume_tokens([token]) == 1
        found.append(token)
    raise AssertionError("no end")


def answers(tokenizer, compiler, source, asked, params=None, prompt="", count=4):
    """(content, reasoning, calls) of random answers."""
    form = AnswerForm(source, tokenizer)
    plan = form.plan(asked, prompt, False, True)
    grammar = form.params(params or SamplingParams(), plan).grammar
    assert grammar is not None
    for seed in range(count):
        tokens = walk(compiler, tokenizer, grammar, seed)
        stream, parser = tokenizer.detokenizer(True, form.kept_ids(asked)), plan.parser()
        pieces = parser.feed(stream.add(tokens) + stream.finish())
        pieces.add(parser.finish())
        calls = [each["function"] for each in joined_calls(pieces.calls)]
        yield pieces.content, pieces.reasoning, calls


def check(call) -> None:
    arguments = json.loads(call["arguments"])
    assert arguments["n"] in range(10) and arguments["s"] in ("é", "日") and len(arguments) == 2
    assert call["name"] in ("first", "second")


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("choice", ["required", "second"])
def test_forced_calls(tokenizer, compiler, source, choice):
    for content, _, calls in answers(tokenizer, compiler, source, tools(choice)):
        assert calls and not content.strip()
        for call in calls:
            check(call)
            assert choice == "required" or call["name"] == choice
    for _, _, calls in answers(tokenizer, compiler, source, tools(choice, parallel=False)):
        assert len(calls) == 1


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_strict_tools_that_need_not_be_called(tokenizer, compiler, source):
    found = list(answers(tokenizer, compiler, source, tools(strict=True), count=12))
    for _, _, calls in found:
        for call in calls:
            check(call)
    assert any(not calls for _, _, calls in found)
    form = AnswerForm(source, tokenizer)
    assert form.params(SamplingParams(), form.plan(tools(), "", False, True)).grammar is None


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_form_of_the_answer_beside_tools(tokenizer, compiler, source):
    params = SamplingParams(grammar=ANSWER)
    for content, _, calls in answers(tokenizer, compiler, source, tools(), params, count=8):
        assert calls or set(json.loads(content)) == {"ok"}


@pytest.mark.parametrize(
    "grammar",
    [
        ANSWER,
        Grammar("json_object", ""),
        Grammar("regex", "[ab]{3}/x"),
        Grammar("choice", '["é", "b"]'),
        Grammar("grammar", 'start: "x"'),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_the_form_begins_behind_the_reasoning(tokenizer, compiler, grammar):
    def fits(content: str) -> bool:
        match grammar.kind:
            case "regex":
                return content.endswith("/x") and set(content[:-2]) <= {"a", "b"} and len(content) == 5
            case "choice":
                return content in ("é", "b")
            case "grammar":
                return content == "x"
        return isinstance(json.loads(content), dict)

    params = SamplingParams(grammar=grammar)
    for source, prompt in (("<think></think>", ""), ("<think></think>", "<think>\n"), (SOURCES["harmony"], "")):
        found = list(answers(tokenizer, compiler, source, None, params, prompt, count=6))
        assert all(fits(content) for content, _, _ in found)
        if prompt or source != "<think></think>":
            assert any(reasoning for _, reasoning, _ in found)
    form = AnswerForm("<think></think>", tokenizer)
    plan = form.plan(None, "<think></think>\n\n", False, True)
    closed = compiler.matcher(form.params(params, plan).grammar)
    assert closed.try_consume_tokens(tokenizer.encode("<think>", add_special=False)) == 0


def test_calls_behind_the_reasoning(tokenizer, compiler):
    found = list(
        answers(tokenizer, compiler, "<think></think><tool_call>", tools("required"), prompt="<think>", count=6)
    )
    for content, _, calls in found:
        assert calls and not content
        for call in calls:
            check(call)
    assert any(reasoning for _, reasoning, _ in found)


def test_llama_makes_one_call_where_the_template_wants_it(tokenizer, compiler):
    source = SOURCES["llama"] + "raise_exception('single tool-calls')"
    assert all(len(calls) == 1 for _, _, calls in answers(tokenizer, compiler, source, tools("required"), count=8))


def test_what_ends_an_answer(tokenizer):
    form = AnswerForm(SOURCES["harmony"], tokenizer)
    call = tokenizer.token_id("<|call|>")
    assert call in form.params(SamplingParams(), form.plan(None, "", False, True)).stop_token_ids
    assert not form.params(SamplingParams(ignore_eos=True), form.plan(None, "", False, True)).stop_token_ids


def test_a_grammar_that_is_too_long(tokenizer):
    form = AnswerForm("<tool_call>", tokenizer)
    schema = {"type": "object", "description": "x" * (1 << 18)}
    definitions = ({"type": "function", "function": {"name": "f", "parameters": schema}},)
    with pytest.raises(ApiError, match="characters"):
        form.params(SamplingParams(), form.plan(Tools(definitions, ("f",), True), "", False, True))
