"""A body of Anthropic's /v1/messages as a chat: blocks become messages, tool results messages of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.server.errors import bad_request

_SAME = {"model", "stream", "temperature", "top_p", "top_k"}
_OWN = {"max_tokens", "messages", "system", "stop_sequences", "tools", "tool_choice", "thinking", "output_config",
        "output_format", "metadata", "service_tier", "cache_control"}  # fmt: skip
_EXTRA = {"min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "ignore_eos",
          "min_tokens", "priority", "cache_salt", "timeout", "chat_template_kwargs"}  # fmt: skip


def chat_body(value: Mapping[str, Any], source: str, *, counting: bool = False) -> tuple[dict[str, Any], list[str]]:
    """(the body of a chat, fields that nobody knows). `source`: of the chat templates. `counting`: only the prompt
    matters. ApiError names the field at fault."""
    given = {name: each for name, each in value.items() if each is not None}
    ignored = [str(name) for name in value if name not in _SAME | _OWN | _EXTRA]
    body = {name: each for name, each in given.items() if name in _SAME | _EXTRA}
    if "max_tokens" in given:
        body["max_tokens"] = given["max_tokens"]
    elif not counting:
        raise bad_request("max_tokens must be given", "max_tokens")
    body["messages"] = [*_system(given.get("system")), *_messages(given.get("messages"))]
    stops = given.get("stop_sequences")
    if stops is not None:
        if not isinstance(stops, list):
            raise bad_request("stop_sequences must be a list of strings", "stop_sequences")
        body["stop"] = stops
    if "tools" in given:
        body["tools"] = _tools(given["tools"])
    body |= _tool_choice(given.get("tool_choice")) | _form(given)
    thinking = _thinking(given.get("thinking"), ignored)
    body["include_reasoning"] = thinking
    if "enable_thinking" in source:
        own = body.get("chat_template_kwargs", {})
        if isinstance(own, Mapping):
            body["chat_template_kwargs"] = {"enable_thinking": thinking, **own}
    return body, ignored


def _system(value: Any) -> list[dict[str, Any]]:
    if value is None or value == []:
        return []
    return [{"role": "system", "content": _text(value, "system", "system")}]


def _text(value: Any, where: str, param: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad_request(f"{where} must be a string or a list of blocks", param)
    texts = []
    for block in value:
        kind = block.get("type") if isinstance(block, Mapping) else None
        text = block.get("text") if isinstance(block, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise bad_request(f"{where}: only blocks of type text are supported, not {str(kind)[:60]!r}", param)
        texts.append(text)
    return "".join(texts)


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise bad_request("messages must be a list of at least one message", "messages")
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the tools that were called, by the calls' ids
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant", "system"):
            raise bad_request(f"{where} must be an object with role user or assistant", "messages")
        content = message.get("content")
        if isinstance(content, str):
            messages.append({"role": message["role"], "content": content})
        elif not isinstance(content, list):
            raise bad_request(f"{where}.content must be a string or a list of blocks", "messages")
        elif message["role"] == "assistant":
            messages.append(_assistant(content, where, names))
        else:
            messages += _user(message["role"], content, where, names)
    return messages


def _assistant(blocks: list[Any], where: str, names: dict[str, str]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            call_id, name, given = (block.get(key) for key in ("id", "name", "input"))
            if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(given, Mapping)):
                raise bad_request(f"{where}: tool_use needs id, name and input", "messages")
            names[call_id] = name
            arguments = json.dumps(given, ensure_ascii=False)
            calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind != "redacted_thinking":
            texts.append(_text([block], where, "messages"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(role: str, blocks: list[Any], where: str, names: Mapping[str, str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    texts: list[Any] = []
    for block in blocks:
        if not isinstance(block, Mapping) or block.get("type") != "tool_result":
            texts.append(block)
            continue
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str):
            raise bad_request(f"{where}: tool_result needs tool_use_id", "messages")
        result = _text(block.get("content") or "", where, "messages")
        if block.get("is_error") is True:
            result = f"Error: {result}"
        name = {"name": names[call_id]} if call_id in names else {}
        messages.append({"role": "tool", "tool_call_id": call_id, **name, "content": result})
    if texts or not messages:
        messages.append({"role": role, "content": _text(texts, where, "messages")})
    return messages


def _tools(value: Any) -> Any:
    if not isinstance(value, list):
        return value  # refused as a chat's
    tools = []
    for index, tool in enumerate(value):
        if not isinstance(tool, Mapping) or tool.get("type", "custom") not in ("custom", None):
            raise bad_request(f"tools[{index}]: only tools with an input_schema of their own are supported", "tools")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, Mapping) else None
    choices = {"auto": "auto", "any": "required", "none": "none"}
    body: dict[str, Any] = {}
    if kind == "tool":
        body["tool_choice"] = {"type": "function", "function": {"name": value.get("name")}}
    elif isinstance(kind, str) and kind in choices:
        body["tool_choice"] = choices[kind]
    else:
        raise bad_request("tool_choice must be an object of type auto, any, tool or none", "tool_choice")
    single = value.get("disable_parallel_tool_use")
    if not isinstance(single, bool | None):
        raise bad_request("tool_choice.disable_parallel_tool_use must be true or false", "tool_choice")
    return {**body, "parallel_tool_calls": not single}


def _form(given: Mapping[str, Any]) -> dict[str, Any]:
    """The form of the answer: output_config.format, or output_format as it was called before."""
    config = given.get("output_config", {})
    if not isinstance(config, Mapping):
        raise bad_request("output_config must be an object", "output_config")
    body: dict[str, Any] = {}
    form, name = config.get("format"), "output_config"
    if form is None:
        form, name = given.get("output_format"), "output_format"
    if form is not None:
        if not isinstance(form, Mapping) or form.get("type") != "json_schema":
            raise bad_request(f"{name}: the format must be an object of type json_schema", name)
        schema = {"name": "answer", "schema": form.get("schema")}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config.get("effort") is not None:
        body["reasoning_effort"] = {"max": "xhigh"}.get(str(config["effort"]), config["effort"])
    return body


def _thinking(value: Any, ignored: list[str]) -> bool:
    """Whether the answer's reasoning is wanted. How much of it is up to the model, so a budget is ignored."""
    if value is None:
        return False
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        raise bad_request("thinking must be an object of type enabled, adaptive or disabled", "thinking")
    budget = value.get("budget_tokens")
    if budget is not None:
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise bad_request("thinking.budget_tokens must be an integer of at least 1", "thinking")
        ignored.append("thinking.budget_tokens")
    return kind != "disabled"
