"""Messages of a chat as templates want them: what clients write in more than one way is made one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

REASONING = ("reasoning_content", "reasoning")  # the names under which clients send a turn's reasoning back


def prepared_messages(messages: Sequence[Mapping[str, Any]], source: str) -> list[Mapping[str, Any]]:
    """For a template of this source.

    Arguments of earlier calls become objects; reasoning goes under the names that templates read; the role "developer"
    becomes "system" where the template does not know it.
    """
    changed: list[Mapping[str, Any]] = []
    for message in messages:
        new = dict(message)
        if new.get("role") == "developer" and "developer" not in source:
            new["role"] = "system"
        if isinstance(new.get("tool_calls"), list):
            new["tool_calls"] = [_with_object(call) for call in new["tool_calls"]]
        _name_reasoning(new, source)
        changed.append(new)
    return changed


def _name_reasoning(message: dict[str, Any], source: str) -> None:
    reasoning = next((message[name] for name in REASONING if isinstance(message.get(name), str)), None)
    for name in REASONING:
        message.pop(name, None)
    if not reasoning:
        return
    message["reasoning_content"] = reasoning
    if ".thinking" in source and message.get("tool_calls") and not message.get("content"):
        message["thinking"] = reasoning  # GPT-OSS: it is needed with calls, and refused beside content


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def effort_variables(effort: str | None, source: str) -> dict[str, Any] | None:
    """Variables of the template for a `reasoning_effort`; None if the template knows no such thing."""
    if effort is None:
        return {}
    found: dict[str, Any] = {}
    if "reasoning_effort" in source:
        found["reasoning_effort"] = {"none": "low", "minimal": "low", "xhigh": "high"}.get(effort, effort)
    if "enable_thinking" in source:
        found["enable_thinking"] = effort != "none"
    return found or None
