"""Grammars of whole answers, put together from parts in llguidance's dialect of Lark.

A tag that is one token of the vocabulary is named by its id: grammars see special tokens (and added ones in angle
brackets) as tokens only, never as their letters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.sampling.params import Grammar

ANY = r"/(.|\n)*/"
_BLANKS = {"whitespace_pattern": "[ ]?"}  # of arguments
_ANSWER_BLANKS = {"whitespace_pattern": r"[ \t\n\r]{0,8}"}  # of a whole answer, as sampling/grammar.py has it


@dataclass(frozen=True)
class Lark:
    """An expression, the rules that it uses, and further grammars that it names with @."""

    expression: str
    rules: str = ""
    others: tuple[Mapping[str, Any], ...] = ()

    def after(self, expression: str, rules: str = "") -> Lark:
        """This behind another expression."""
        return Lark(f"{expression} ({self.expression})", rules + self.rules, self.others)

    def either(self, other: Lark) -> Lark:
        return Lark(f"({self.expression} | {other.expression})", self.rules + other.rules, self.others + other.others)

    def grammar(self) -> Grammar:
        """ValueError if it is too long."""
        text = f"start: {self.expression}\n{self.rules}"
        if not self.others:
            return Grammar("grammar", text)
        return Grammar("grammar", json.dumps({"grammars": [{"lark_grammar": text}, *self.others]}))


def answer(grammar: Grammar) -> Lark:
    """A user's grammar as a part. ValueError if it cannot be read."""
    if grammar.kind == "json_object":
        inner: dict[str, Any] = {"json_schema": {"type": "object", "x-guidance": _ANSWER_BLANKS}}
    elif grammar.kind == "json_schema":
        inner = {"json_schema": {**json.loads(grammar.text), "x-guidance": _ANSWER_BLANKS}}
    elif grammar.kind == "regex":
        escaped = re.sub(r"\\.|/", lambda m: r"\/" if m[0] == "/" else m[0], grammar.text, flags=re.DOTALL)
        inner = {"lark_grammar": f"start: /{escaped}/\n"}
    elif grammar.kind == "choice":
        words = " | ".join(json.dumps(word, ensure_ascii=False) for word in json.loads(grammar.text))
        inner = {"lark_grammar": f"start: {words}\n"}
    else:
        inner = {"lark_grammar": grammar.text}
    return Lark("@answer", "", ({"name": "answer", **inner},))


def json_part(schema: Mapping[str, Any]) -> str:
    """JSON of a schema, with no blanks to speak of."""
    return "%json " + json.dumps({**schema, "x-guidance": _BLANKS})


@dataclass(frozen=True)
class Tags:
    """How tags are written in a grammar for one vocabulary."""

    token_id: Callable[[str], int | None]

    def __call__(self, tag: str) -> str:
        token = self.token_id(tag)
        return json.dumps(tag) if token is None else f"<[{token}]>"

    def text_before(self, tag: str, name: str) -> tuple[str, str]:
        """(expression, rules) of any text and the tag behind it. `name` is for the rules: lower case letters."""
        if self.token_id(tag) is None:
            return name, f"{name}[lazy]: {ANY} {json.dumps(tag)}\n"
        upper = name.upper()
        return f"{upper} {self(tag)}", f"{upper}: {ANY} & ~{_containing(tag)}\n"


def _containing(text: str) -> str:
    """Any text that holds `text`."""
    escaped = re.sub(r"([][(){}.*+?|^$\\/])", r"\\\1", text)
    return rf"/(.|\n)*{escaped}(.|\n)*/"
