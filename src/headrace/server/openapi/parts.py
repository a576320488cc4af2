"""Short ways to write JSON schemas, and those that several routes share."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
COUNT: Schema = {"type": "integer", "minimum": 0}


def integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float, *, low_open: bool = False) -> Schema:
    return {"type": "number", "exclusiveMinimum" if low_open else "minimum": low, "maximum": high}


def string(least: int = 0, most: int | None = None) -> Schema:
    return {**STRING, **({"minLength": least} if least else {}), **({} if most is None else {"maxLength": most})}


def listed(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    found: Schema = {"type": "array", "items": items}
    if least:
        found["minItems"] = least
    if most is not None:
        found["maxItems"] = most
    return found


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def or_null(schema: Schema) -> Schema:
    return any_of(schema, {"type": "null"})


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object. Optional fields may be null, which says nothing; others than these are ignored."""
    properties = {**required, **{name: or_null(schema) for name, schema in (optional or {}).items()}}
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def answer(fields: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object that is sent: what is required is there, what is optional may be missing but is not null."""
    return {"type": "object", "properties": {**fields, **(optional or {})}, "required": list(fields)}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


ERROR = answer(
    {
        "error": answer({
            "message": STRING, "type": STRING, "param": or_null(STRING), "code": or_null(STRING),
        })
    }
)  # fmt: skip
ANTHROPIC_ERROR = answer({"type": one_of("error"), "error": answer({"message": STRING, "type": STRING})})
LOGPROB = answer(
    {"token": STRING, "logprob": {"type": "number", "maximum": 1e-6}, "bytes": listed(integer(0, 255))},
    {"top_logprobs": listed(OBJECT)},
)
CALL = answer(
    {
        "id": STRING, "type": one_of("function"), "function": answer({"name": STRING, "arguments": STRING}),
    }
)  # fmt: skip
USAGE = answer(
    {
        "prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT,
        "prompt_tokens_details": answer({"cached_tokens": COUNT}),
    },
    {"completion_tokens_details": answer({"reasoning_tokens": COUNT})},
)  # fmt: skip
COMPONENTS: dict[str, Schema] = {
    "Error": ERROR, "AnthropicError": ANTHROPIC_ERROR, "Logprob": LOGPROB, "Call": CALL, "Usage": USAGE,
}  # fmt: skip
