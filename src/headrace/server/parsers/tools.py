"""What a body of the API says of tools, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.server.errors import bad_request

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tools:
    """Tools that may be called."""

    definitions: tuple[Mapping[str, Any], ...]
    forced: tuple[str, ...]  # names of which one must be called; empty: the model chooses
    parallel: bool  # several calls in one answer

    @property
    def names(self) -> frozenset[str]:
        return frozenset(each["function"]["name"] for each in self.definitions)

    @property
    def strict(self) -> bool:
        """Whether calls that the model chooses to make must fit their schemas too."""
        return any(each["function"].get("strict") is True for each in self.definitions)

    def schemas(self) -> list[tuple[str, Mapping[str, Any]]]:
        """(name, schema of the arguments) of the tools that the answer may call."""
        functions = [each["function"] for each in self.definitions]
        return [
            (function["name"], function.get("parameters") or {"type": "object"})
            for function in functions
            if not self.forced or function["name"] in self.forced
        ]


def parse_tools(value: Mapping[str, Any]) -> Tools | None:
    """Of a body; None where no tool may be called. ApiError names the field at fault."""
    definitions, choice = value.get("tools"), value.get("tool_choice")
    parallel = value.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise bad_request("parallel_tool_calls must be true or false", "parallel_tool_calls")
    if definitions is not None and (not isinstance(definitions, list) or len(definitions) > MAX_TOOLS):
        raise bad_request(f"tools must be a list of at most {MAX_TOOLS} tools", "tools")
    names = [_name(each, index) for index, each in enumerate(definitions or [])]
    if len(set(names)) != len(names):
        raise bad_request("tools: two tools have the same name", "tools")
    forced = _forced(choice, names)
    if not names or choice == "none":
        return None
    return Tools(tuple(definitions or ()), forced, parallel is not False)


def _name(tool: Any, index: int) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise bad_request(f"tools[{index}] must be an object with type function and a function", "tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(f"tools[{index}].function.name must be 1 to 64 letters, digits, _, . or -", "tools")
    if not isinstance(parameters, Mapping | None):
        raise bad_request(f"tools[{index}].function.parameters must be a JSON schema", "tools")
    if not isinstance(function.get("description"), str | None):
        raise bad_request(f"tools[{index}].function.description must be a string", "tools")
    if not isinstance(function.get("strict"), bool | None):
        raise bad_request(f"tools[{index}].function.strict must be true or false", "tools")
    return name


def _forced(choice: Any, names: Sequence[str]) -> tuple[str, ...]:
    if choice in (None, "none", "auto"):
        return ()
    if not names:
        raise bad_request("tool_choice asks for a call, but there are no tools", "tool_choice")
    if choice == "required":
        return tuple(names)
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise bad_request("tool_choice must be none, auto, required or name a function", "tool_choice")
    if name not in names:
        raise bad_request(f"tool_choice names {name[:64]!r}, which is none of the tools", "tool_choice")
    return (name,)
