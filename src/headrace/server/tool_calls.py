"""Tool calls in the form of Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call> within the text.

A parser is fed text as it comes and does a bounded amount of work for each character, so that no text can make it
slow. The arguments are passed on as the model wrote them, a stream's pieces adding up to what the whole answer has.
What turns out to be no call is content, byte for byte.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.sampling.params import Grammar
from headrace.server.errors import bad_request

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.){1,128}")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_MAX_HEAD = 512  # characters in which a call must have begun to show its arguments; else it is read when it is whole


@dataclass(frozen=True)
class Tools:
    """What a body says of tools, checked."""

    definitions: tuple[Mapping[str, Any], ...]
    forced: tuple[str, ...]  # names of which one must be called; empty: the model chooses
    parallel: bool  # several calls in one answer

    def grammar(self) -> Grammar | None:
        """The form of an answer that must be a call."""
        if not self.forced:
            return None
        calls = []
        for each in self.definitions:
            function = each["function"]
            if function["name"] in self.forced:
                arguments = function.get("parameters") or {"type": "object"}
                calls.append(
                    {
                        "type": "object",
                        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
                        "required": ["name", "arguments"],
                        "additionalProperties": False,
                    }
                )
        schema = {"x-guidance": {"whitespace_pattern": "[ ]?"}, **({"anyOf": calls} if len(calls) > 1 else calls[0])}
        more = f'("\\n{OPEN}\\n" call "\\n{CLOSE}")*' if self.parallel else ""
        text = f'start: "{OPEN}\\n" call "\\n{CLOSE}" {more}\ncall: %json {json.dumps(schema)}\n'
        return Grammar("grammar", text)


def parse_tools(value: Mapping[str, Any], template_source: str | None) -> Tools | None:
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
    if OPEN not in (template_source or ""):
        raise bad_request(
            "this model's chat template has no form of tool calls that is known; leave tools out", "tools"
        )
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


def with_argument_objects(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages whose earlier calls have their arguments as objects, as templates want them, not as JSON text."""
    changed: list[Mapping[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message = {**message, "tool_calls": [_with_object(call) for call in calls]}
        changed.append(message)
    return changed


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


@dataclass
class Pieces:
    """What text became: `content`, and the `tool_calls` of a chunk's delta."""

    content: str
    calls: list[dict[str, Any]]


class ToolParser:
    """Splits one choice's text."""

    def __init__(self, parallel: bool = True):
        self._parallel = parallel
        self._held = ""  # blanks and what may be the beginning of a tag
        self._call: _Call | None = None
        self.num_calls = 0

    def feed(self, text: str) -> Pieces:
        """Take in more text."""
        content: list[str] = []
        calls: list[dict[str, Any]] = []
        while text:
            if self._call is None:
                text = self._outside(text, content)
            else:
                text = self._inside(self._call, text, content, calls)
        return Pieces("".join(content), calls)

    def finish(self) -> Pieces:
        """The text has ended."""
        content: list[str] = []
        calls: list[dict[str, Any]] = []
        if self._call is not None:
            self._end(self._call, content, calls, closed=False)
        elif not (self.num_calls and self._held.isspace()):
            content.append(self._held)
        self._held, self._call = "", None
        return Pieces("".join(content), calls)

    def _outside(self, text: str, content: list[str]) -> str:
        """Content up to a tag; returns what comes after it."""
        text = self._held + text
        start = text.find(OPEN)
        if start >= 0:
            before = text[:start]
            content.append(before.rstrip() if before.strip() else "")
            self._held = ""
            self._call = _Call(before[len(before.rstrip()) :] + OPEN)
            return text[start + len(OPEN) :]
        keep = next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-n:])), 0)
        shown = text[: len(text) - keep].rstrip()
        self._held = text[len(shown) :]
        content.append(shown)
        return ""

    def _inside(self, call: _Call, text: str, content: list[str], calls: list[dict[str, Any]]) -> str:
        end, piece = call.take(text)
        if call.begun and not call.told and self._wanted:
            call.told = True
            calls.append(_start(self.num_calls, call.name))
        if piece and call.told:
            calls.append(_arguments(self.num_calls, piece))
        if end < 0:
            return ""
        self._end(call, content, calls, closed=True)
        self._call = None
        return text[end:]

    @property
    def _wanted(self) -> bool:
        return self._parallel or not self.num_calls

    def _end(self, call: _Call, content: list[str], calls: list[dict[str, Any]], *, closed: bool) -> None:
        if call.told:
            self.num_calls += 1
            return
        if call.begun:  # a second call where one was allowed
            return
        found = call.whole() if closed else None
        if found is None:
            content.append(call.before + call.text)
        elif self._wanted:
            name, arguments = found
            calls += [_start(self.num_calls, name), _arguments(self.num_calls, arguments)]
            self.num_calls += 1


class _Call:
    """What is between the tags, as it comes."""

    def __init__(self, before: str):
        self.before = before  # the tag, and blanks before it
        self.name = ""
        self.begun = False  # the arguments are being passed on
        self.told = False  # and the call was announced
        self._over = False  # they are whole
        self._depth = 0
        self._string = self._escaped = False
        self._parts: list[str] = []
        self._length = 0
        self._tail = ""  # the last characters, in which the closing tag may have begun

    def take(self, text: str) -> tuple[int, str]:
        """(index in `text` after the closing tag, or -1 without it; arguments to be passed on)."""
        joined = self._tail + text
        at = joined.find(CLOSE) if not self.begun or self._over else -1
        if not self.begun:
            return self._before_arguments(text, joined, at)
        if not self._over:
            return self._arguments(text)
        return self._skip(text, joined, at)

    def _before_arguments(self, text: str, joined: str, at: int) -> tuple[int, str]:
        end = at + len(CLOSE) - len(self._tail) if at >= 0 else -1
        self._parts.append(text if end < 0 else text[:end])
        self._length += len(self._parts[-1])
        self._tail = joined[-(len(CLOSE) - 1) :]
        short = self._length - len(self._parts[-1]) <= _MAX_HEAD
        if short:
            whole = "".join(self._parts)
            self._parts = [whole]
            head = _HEAD.match(whole[: _MAX_HEAD * 2])
            if head is not None:
                try:
                    self.name = json.loads(head[1])
                except ValueError:
                    head = None
            if head is not None:
                self.begun = True
                rest = whole[head.end() :] + ("" if end < 0 else text[end:])
                consumed, piece = self._arguments(rest)
                if consumed < 0:
                    return -1, piece
                return len(text) - (len(rest) - consumed), piece
        return end, ""

    @property
    def text(self) -> str:
        """All of it, the closing tag too, as long as no arguments have been passed on."""
        return "".join(self._parts)

    def _arguments(self, text: str) -> tuple[int, str]:
        """Forward over a JSON object, to its end."""
        for index, character in enumerate(text):
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._string = False
            elif character == '"':
                self._string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._over, self._tail = True, ""
                    rest = text[index + 1 :]
                    end, _ = self._skip(rest, rest, rest.find(CLOSE))
                    return (index + 1 + end if end >= 0 else -1), text[: index + 1]
        return -1, text

    def _skip(self, text: str, joined: str, at: int) -> tuple[int, str]:
        """What follows the arguments has no meaning."""
        end = at + len(CLOSE) - len(self._tail) if at >= 0 else -1
        self._tail = joined[-(len(CLOSE) - 1) :]
        return end, ""

    def whole(self) -> tuple[str, str] | None:
        """Name and arguments of a call that did not begin as usual, read at once; None if it is no call."""
        try:
            value = json.loads(self.text.removesuffix(CLOSE))
        except (ValueError, RecursionError):
            return None
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _start(index: int, name: str) -> dict[str, Any]:
    call_id = f"call_{uuid.uuid4().hex[:24]}"
    return {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}


def _arguments(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "function": {"arguments": text}}


def joined_calls(pieces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a whole answer, from the pieces of a stream."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if "id" in piece:
            calls.append({"id": piece["id"], "type": "function", "function": dict(piece["function"])})
        else:
            calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return calls
