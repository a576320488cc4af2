"""Calls as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call> within the text."""

from __future__ import annotations

import json
from typing import Any

from headrace.server.parsers.base import CallParser, ObjectCall, Pieces, State, ToolForm
from headrace.server.parsers.lark import Lark, Tags, json_part
from headrace.server.parsers.tools import Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    tags = (OPEN,)

    def _open(self, tag: str) -> State:
        self._call = ObjectCall()
        return self._inside

    def _inside(self, text: str, out: Pieces) -> str:
        rest, ended = self._object(self._call, text, out)
        if ended:
            self._state = self._behind
        elif self._call.done or self._call.broken:
            self._state = self._outside
            self._show(self._shown(OPEN) + self._call.text, out)
        return rest

    def _behind(self, text: str, out: Pieces) -> str:
        """After a call: the closing tag, if it comes."""
        stripped = text.lstrip()
        if not stripped:
            self._blanks.append(text)
            return ""
        if stripped.startswith(CLOSE):
            self._state = self._outside
            self._drop_blanks()
            return stripped[len(CLOSE) :]
        if CLOSE.startswith(stripped):
            self._held = text
            return ""
        self._state = self._outside
        return text

    def _close(self, out: Pieces) -> None:
        if self._state != self._inside:
            return
        if self._call.begun:
            self._stop()
        else:
            self._show_unfinished(self._shown(OPEN) + self._call.text, out)


class Hermes(ToolForm):
    name = "hermes"
    tags = (OPEN, CLOSE)

    @staticmethod
    def matches(source: str) -> bool:
        return OPEN in source

    def parser(self, tools: Tools | None, hidden: frozenset[str]) -> HermesParser:
        return HermesParser(tools, hidden)

    def calls(self, tools: Tools, tags: Tags) -> Lark:
        one = f'{tags(OPEN)} "\\n" call "\\n" {tags(CLOSE)}'
        more = f' ("\\n" {one})*' if tools.parallel else ""
        return Lark(one + more, f"call: {json_part(call_schema(tools, 'arguments'))}\n")

    def text_with_calls(self, tools: Tools, tags: Tags) -> Lark:
        before, rules = tags.text_before(OPEN, "before")
        call = f'{before} "\\n" call "\\n" {tags(CLOSE)}'
        times = "*" if tools.parallel else "?"
        rules += f"call: {json_part(call_schema(tools, 'arguments'))}\nREST: /(.|\\n)*/\n"
        return Lark(f"({call}){times} REST", rules)


def call_schema(tools: Tools, key: str) -> dict[str, Any]:
    """The schema of an object with `name` and, under `key`, the arguments of one of the tools."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: schema},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name, schema in tools.schemas()
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": json.loads(json.dumps(calls))}
