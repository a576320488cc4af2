"""Calls as Mistral writes them. Older models: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]; newer ones, for
each call: [TOOL_CALLS]name[ARGS]{...}, maybe with [CALL_ID] and an id behind the name, or with nothing between the name
and {.
"""

from __future__ import annotations

import json
import re
import secrets
import string

from headrace.server.parsers.base import CallParser, JsonScanner, ObjectCall, Pieces, State, ToolForm
from headrace.server.parsers.hermes import call_schema
from headrace.server.parsers.lark import Lark, Tags, json_part
from headrace.server.parsers.tools import Tools

TAG, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})\s*(?:\[CALL_ID\]\s*[A-Za-z0-9_-]{1,64}\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_MAX_NAME = 256  # characters from the tag to the arguments
_ID_LETTERS = string.ascii_letters + string.digits


class MistralParser(CallParser):
    tags = (TAG,)

    def _open(self, tag: str) -> State:
        self._head = ""
        return self._opened

    def _opened(self, text: str, out: Pieces) -> str:
        """A list of calls, or a name."""
        head = self._head + text
        stripped = head.lstrip()
        if stripped.startswith("["):
            self._before = self._shown(TAG) + head[: len(head) - len(stripped) + 1]
            self._call = ObjectCall()
            self._state = self._in_list
            return stripped[1:]
        match = _NAME.match(head[: 2 * _MAX_NAME])
        if match is not None:
            self._start(match[1], out)
            self._scanner = JsonScanner()
            self._state = self._arguments
            return head[match.end() :]
        if "{" in head or TAG in head or len(head) > _MAX_NAME:
            self._show(self._shown(TAG), out)
            self._state = self._outside
            return head
        self._head = head
        return ""

    def _arguments(self, text: str, out: Pieces) -> str:
        used = self._scanner.take(text)
        self._argue(text[:used], out)
        if self._scanner.done or self._scanner.broken:
            self._stop()
            self._state = self._outside
        return text[used:]

    def _in_list(self, text: str, out: Pieces) -> str:
        rest, ended = self._object(self._call, text, out)
        if ended:
            self._state = self._between
        elif self._call.done or self._call.broken:
            self._state = self._outside
            self._show(self._before + self._call.text, out)
        return rest

    def _between(self, text: str, out: Pieces) -> str:
        """Between the calls of a list."""
        stripped = text.lstrip()
        if not stripped:
            self._blanks.append(text)
            return ""
        if stripped[0] == ",":
            self._before, self._call = ",", ObjectCall()
            self._state = self._in_list
            return stripped[1:]
        self._state = self._outside
        return stripped[1:] if stripped[0] == "]" else text

    def _close(self, out: Pieces) -> None:
        if self._state == self._opened:
            self._show_unfinished(self._shown(TAG) + self._head, out)
        elif self._state == self._arguments:
            self._stop()
        elif self._state == self._in_list:
            if self._call.begun:
                self._stop()
            else:
                self._show_unfinished(self._before + self._call.text, out)

    def _new_id(self) -> str:
        """The templates of these models refuse others."""
        return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


class Mistral(ToolForm):
    name = "mistral"
    tags = (TAG, ARGS, CALL_ID)

    def __init__(self, source: str = ""):
        self._named = ARGS in source  # which of the two forms the template prints

    @staticmethod
    def matches(source: str) -> bool:
        return TAG in source

    def parser(self, tools: Tools | None, hidden: frozenset[str]) -> MistralParser:
        return MistralParser(tools, hidden)

    def calls(self, tools: Tools, tags: Tags) -> Lark:
        if not self._named:
            more = ' (", " call)*' if tools.parallel else ""
            rules = f"call: {json_part(call_schema(tools, 'arguments'))}\n"
            return Lark(f'{tags(TAG)} "[" call{more} "]"', rules)
        return Lark("call+" if tools.parallel else "call", f"call: {tags(TAG)} named\n" + self._rules(tools, tags))

    def text_with_calls(self, tools: Tools, tags: Tags) -> Lark:
        before, rules = tags.text_before(TAG, "before")
        rules += "REST: /(.|\\n)*/\n"
        if not self._named:
            more = ' (", " call)*' if tools.parallel else ""
            rules += f"call: {json_part(call_schema(tools, 'arguments'))}\n"
            return Lark(f'(REST | {before} "[" call{more} "]")', rules)
        times = "*" if tools.parallel else "?"
        return Lark(f"({before} named){times} REST", rules + self._rules(tools, tags))

    @staticmethod
    def _rules(tools: Tools, tags: Tags) -> str:
        """`named`: a name and its arguments."""
        pairs = [
            f"{json.dumps(name)} {tags(ARGS)} arguments_{index}" for index, (name, _) in enumerate(tools.schemas())
        ]
        rules = [f"arguments_{index}: {json_part(schema)}\n" for index, (_, schema) in enumerate(tools.schemas())]
        return f"named: {' | '.join(pairs)}\n" + "".join(rules)
