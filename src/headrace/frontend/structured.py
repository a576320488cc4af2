"""What a body says of its answer's form: OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.sampling.params import Grammar, GrammarKind

FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_KINDS: dict[str, GrammarKind] = {
    "json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar", "json_object": "json_object",
}  # fmt: skip


class FormError(ValueError):
    """A form that is not understood; `param` is the field at fault."""

    def __init__(self, message: str, param: str):
        super().__init__(message)
        self.param = param


def grammar_of(given: Mapping[str, Any]) -> Grammar | None:
    """The grammar that a body's fields ask for, None if they ask for none. `given` holds no nulls. FormError."""
    found: list[tuple[str, Grammar]] = []
    for name in FIELDS:
        if name not in given:
            continue
        value = given[name]
        if name == "response_format":
            grammar = _response_format(value)
        elif name == "structured_outputs":
            grammar = _structured_outputs(value)
        else:
            grammar = _grammar(_KINDS[name.removeprefix("guided_")], value, name)
        if grammar is not None:
            found.append((name, grammar))
    if len(found) > 1:
        raise FormError(f"{found[0][0]} and {found[1][0]} exclude each other", found[1][0])
    return found[0][1] if found else None


def _response_format(value: Any) -> Grammar | None:
    name = "response_format"
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object", "")
    if kind == "json_schema":
        wrapped = value.get("json_schema")
        if not isinstance(wrapped, Mapping) or "schema" not in wrapped:
            raise FormError("response_format.json_schema must be an object with a schema", name)
        return _grammar("json_schema", wrapped["schema"], name)
    raise FormError("response_format must be an object of type text, json_object or json_schema", name)


def _structured_outputs(value: Any) -> Grammar | None:
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise FormError(f"{name} must be an object", name)
    asked = {kind: each for kind, each in value.items() if kind in _KINDS and each is not None}
    unknown = sorted(str(kind) for kind in value if kind not in _KINDS)
    if unknown:
        raise FormError(f"{name} does not have {', '.join(unknown)[:200]}; it has {', '.join(_KINDS)}", name)
    if len(asked) != 1:
        raise FormError(f"{name} must have exactly one of {', '.join(_KINDS)}", name)
    ((kind, each),) = asked.items()
    if kind == "json_object":
        if each is not True:
            raise FormError(f"{name}.json_object must be true; leave it out otherwise", name)
        return Grammar("json_object", "")
    return _grammar(_KINDS[kind], each, name)


def _grammar(kind: GrammarKind, value: Any, name: str) -> Grammar:
    try:
        if kind == "json_schema":
            if isinstance(value, str) and value.lstrip().startswith("{"):  # some clients send it as text
                value = json.loads(value)
            if value is not True and not isinstance(value, Mapping):
                raise FormError(f"{name}: a schema must be an object", name)
            return Grammar(kind, json.dumps({} if value is True else value, allow_nan=False))
        if kind == "choice":
            if not isinstance(value, list) or not value or not all(isinstance(word, str) and word for word in value):
                raise FormError(f"{name}: choice must be a list of strings that are not empty", name)
            return Grammar(kind, json.dumps(value))
        if not isinstance(value, str) or not value:
            raise FormError(f"{name}: a {kind} must be a string that is not empty", name)
        return Grammar(kind, value)
    except FormError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormError(f"{name}: {error}", name) from None
