"""A body of /v1/responses as a chat: items become messages, flat tools nested ones, text.format a response_format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.frontend.openai_request import CHAT, known_fields
from headrace.server.errors import bad_request
from headrace.server.protocol import EFFORTS

MAX_ITEMS = 10_000
LOGPROBS = "message.output_text.logprobs"
_SAME = {"model", "stream", "temperature", "top_p", "parallel_tool_calls", "user", "metadata", "service_tier",
         "safety_identifier", "prompt_cache_key"}  # fmt: skip
_OWN = {"input", "instructions", "tools", "tool_choice", "text", "reasoning", "max_output_tokens", "top_logprobs",
        "include", "previous_response_id", "store", "truncation", "background", "stream_options"}  # fmt: skip
_NOT_HERE = {"messages", "max_tokens", "max_completion_tokens", "logprobs", "n", "response_format", "best_of",
             "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "beam_width",
             "functions", "function_call", "audio", "modalities", "prediction", "length_penalty", "early_stopping",
             "reasoning_effort", "stop"}  # fmt: skip
_EXTRA = (known_fields(CHAT) | {"priority", "cache_salt", "timeout"}) - _NOT_HERE  # sampling fields beyond OpenAI's
_INACTIVE: dict[str, tuple[Any, ...]] = {
    "background": (False,), "truncation": ("disabled",), "conversation": (), "prompt": (),
}  # fmt: skip


def chat_body(value: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the body of a chat without its messages, fields that nobody knows). ApiError names the field at fault."""
    given = {name: each for name, each in value.items() if each is not None}
    for name, allowed in _INACTIVE.items():
        if name in given and given[name] not in allowed:
            raise bad_request(f"{name} is not supported here; leave it out", name)
    known = _SAME | _OWN | _EXTRA | set(_INACTIVE)
    body = {name: each for name, each in given.items() if name in _SAME | _EXTRA}
    ignored = [str(name) for name in value if name not in known]
    if "max_output_tokens" in given:
        body["max_completion_tokens"] = given["max_output_tokens"]
    if "tools" in given:
        body["tools"] = _tools(given["tools"])
    if "tool_choice" in given:
        body["tool_choice"] = _tool_choice(given["tool_choice"])
    body |= _text(given.get("text")) | _reasoning(given.get("reasoning")) | _logprobs(given)
    if not isinstance(given.get("store", True), bool):
        raise bad_request("store must be true or false", "store")
    for name in ("instructions", "previous_response_id"):
        if not isinstance(given.get(name, ""), str):
            raise bad_request(f"{name} must be a string", name)
    if not isinstance(given.get("stream_options", {}), Mapping):
        raise bad_request("stream_options must be an object", "stream_options")
    return body, ignored


def _tools(value: Any) -> Any:
    if not isinstance(value, list):
        return value  # refused as a chat's
    tools = []
    for index, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind != "function":
            raise bad_request(f"tools[{index}]: only tools of type function are supported, not {kind!r}"[:200], "tools")
        tools.append({"type": "function", "function": {k: v for k, v in tool.items() if k != "type" and v is not None}})
    return tools


def _tool_choice(value: Any) -> Any:
    if isinstance(value, Mapping) and value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    return value


def _text(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise bad_request("text must be an object", "text")
    form = value.get("format")
    if form is None:
        return {}
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        schema = {name: each for name, each in form.items() if name != "type"}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {"response_format": form}


def _reasoning(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise bad_request("reasoning must be an object", "reasoning")
    effort = value.get("effort")
    if effort is not None and effort not in EFFORTS:
        raise bad_request(f"reasoning.effort must be one of {', '.join(EFFORTS)}", "reasoning")
    return {} if effort is None else {"reasoning_effort": effort}


def _logprobs(given: Mapping[str, Any]) -> dict[str, Any]:
    include = given.get("include", [])
    if not isinstance(include, list) or not all(isinstance(each, str) for each in include):
        raise bad_request("include must be a list of strings", "include")
    top = given.get("top_logprobs")
    if LOGPROBS not in include and not top:
        if top is not None and (isinstance(top, bool) or top != 0):
            raise bad_request("top_logprobs must be an integer", "top_logprobs")
        return {}
    return {"logprobs": True, **({} if top is None else {"top_logprobs": top})}


# -- items


def messages_of(value: Any) -> list[dict[str, Any]]:
    """The `input` of a body as messages."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise bad_request("input must be a string or a list of at least one item", "input")
    if len(value) > MAX_ITEMS:
        raise bad_request(f"input has {len(value)} items; at most {MAX_ITEMS} are taken", "input")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        _add_item(item, f"input[{index}]", messages)
    return [message for message in messages if set(message) != {"role"}]


def _add_item(item: Any, where: str, messages: list[dict[str, Any]]) -> None:
    if not isinstance(item, Mapping):
        raise bad_request(f"{where} must be an object", "input")
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise bad_request(f"{where}.role must be user, assistant, system or developer", "input")
        content = _content(item.get("content"), where)
        last = messages[-1] if messages else {}
        if role == "assistant" and last.get("role") == "assistant" and "content" not in last:
            last["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "reasoning":
        text = "".join(_parts(item.get("content") or item.get("summary") or [], where))
        messages.append({"role": "assistant", **({"reasoning_content": text} if text else {})})
    elif kind == "function_call":
        call_id, name, arguments = (item.get(key) for key in ("call_id", "name", "arguments"))
        if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, str)):
            raise bad_request(f"{where} needs call_id, name and arguments, all strings", "input")
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant"})
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        call_id = item.get("call_id")
        if not isinstance(call_id, str):
            raise bad_request(f"{where}.call_id must be a string", "input")
        output = _content(item.get("output"), where)
        messages.append({"role": "tool", "tool_call_id": call_id, **_named(call_id, messages), "content": output})
    else:
        raise bad_request(f"{where}: items of type {str(kind)[:60]!r} are not supported", "input")


def _named(call_id: str, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The name of the function that was called; some templates want it."""
    for message in reversed(messages):
        for call in message.get("tool_calls", ()):
            if call["id"] == call_id:
                return {"name": call["function"]["name"]}
    return {}


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad_request(f"{where}.content must be a string or a list of parts", "input")
    return "".join(_parts(value, where))


def _parts(value: Any, where: str) -> list[str]:
    texts = []
    for part in value if isinstance(value, list) else [None]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        kinds = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
        if kind not in kinds or not isinstance(text, str):
            raise bad_request(f"{where}: only parts of text are supported, not {str(kind)[:60]!r}", "input")
        texts.append(text)
    return texts
