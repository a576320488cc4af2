"""Calls as Llama 3 writes them: an answer that is {"name": ..., "parameters": {...}} and nothing else, or that follows
<|python_tag|>; several with ";" or blanks between. After the tag also tool.call(name="value"), the form of the tools
that Llama 3.1 was trained with; other code after it is content.

An object is taken for a call only if its name is a tool's, since answers may be JSON that is none.
"""

from __future__ import annotations

import ast
import json
import re

from headrace.server.parsers.base import MAX_HEAD, CallParser, ObjectCall, Pieces, State, ToolForm
from headrace.server.parsers.hermes import call_schema
from headrace.server.parsers.lark import Lark, Tags, json_part
from headrace.server.parsers.tools import Tools

TAG = "<|python_tag|>"
_FIRST_KEY = re.compile(r'\s*\{\s*"(?:name|parameters|arguments|type|function|id)"\s*:')
_MAX_KEY = 40  # characters in which the first key of a call must stand
_MAX_CODE = 1 << 16  # characters of a call as code
_MAX_CODE_HEAD = 100  # those that say whether it is one
_CODE_CALL = re.compile(r"\s*([A-Za-z0-9_-]{1,64})\.call\((.*)\)\s*", re.DOTALL)


class LlamaParser(CallParser):
    tags = (TAG,)

    def __init__(self, tools: Tools | None, hidden: frozenset[str] = frozenset()):
        super().__init__(tools, hidden)
        self._names = tools.names if tools is not None else frozenset()
        self._state = self._beginning
        self._tag = ""  # the tag of this call, if it has one
        self._code: list[str] = []
        self._code_length = 0

    def _beginning(self, text: str, out: Pieces) -> str:
        """Where an answer, or a further call, may begin with an object."""
        stripped = text.lstrip(" \t\r\n;") if self.num_calls else text.lstrip()
        if not stripped:
            self._blanks.append(text)
            return ""
        self._blanks.append(text[: len(text) - len(stripped)])
        if stripped.startswith("{"):
            self._tag = ""
            self._call = ObjectCall(self._names)
            self._state = self._inside
        else:
            self._state = self._outside
        return stripped

    def _open(self, tag: str) -> State:
        self._tag, self._code, self._code_length = tag, [], 0
        return self._tagged

    def _tagged(self, text: str, out: Pieces) -> str:
        stripped = text.lstrip()
        if not stripped:
            self._held = text
            return ""
        if stripped.startswith("{"):
            self._call = ObjectCall(self._names)
            self._state = self._inside
        else:
            self._state = self._in_code
        return text

    def _inside(self, text: str, out: Pieces) -> str:
        rest, ended = self._object(self._call, text, out)
        if ended:
            self._state = self._beginning
        elif self._call.done or self._call.broken or self._is_other(self._call):
            self._state = self._outside
            self._show(self._shown(self._tag) + self._call.text, out)
        return rest

    @staticmethod
    def _is_other(call: ObjectCall) -> bool:
        """An object that is no call, as its first key says: it need not be held back."""
        if call.begun or not _MAX_KEY < call.length <= MAX_HEAD:
            return False
        return not _FIRST_KEY.match(call.text)

    def _in_code(self, text: str, out: Pieces) -> str:
        """Code is held until its end, if it may be a call."""
        decided = self._code_length >= _MAX_CODE_HEAD
        self._code.append(text)
        self._code_length += len(text)
        if self._code_length > _MAX_CODE or not (decided or self._may_be_call("".join(self._code)[:_MAX_CODE_HEAD])):
            self._show(self._shown(TAG) + "".join(self._code), out)
            self._state = self._outside
        return ""

    def _may_be_call(self, code: str) -> bool:
        match = re.match(r"\s*([A-Za-z0-9_-]*)(.*)", code, re.DOTALL)
        assert match is not None
        name, rest = match[1], match[2]
        if not rest:
            return any(each.startswith(name) for each in self._names)
        return name in self._names and ".call(".startswith(rest[:6])

    def _close(self, out: Pieces) -> None:
        if self._state == self._inside:
            if self._call.begun:
                self._stop()
            else:
                self._show_unfinished(self._shown(self._tag) + self._call.text, out)
        elif self._state == self._tagged:
            self._show_unfinished(self._shown(self._tag) + self._held, out)
            self._held = ""
        elif self._state == self._in_code:
            self._end_code(out)

    def _end_code(self, out: Pieces) -> None:
        code = "".join(self._code)
        found = code_call(code)
        if found is None or found[0] not in self._names:
            self._show(self._shown(TAG) + code, out)
            return
        self._start(found[0], out)
        self._argue(found[1], out)
        self._stop()


def code_call(code: str) -> tuple[str, str] | None:
    """(name, arguments) of name.call(a="b", c=1); None for other code."""
    match = _CODE_CALL.fullmatch(code) if len(code) <= _MAX_CODE else None
    if match is None:
        return None
    try:
        call = ast.parse(f"f({match[2]})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
            return None
        values = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return match[1], json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


class Llama(ToolForm):
    name = "llama"
    tags = (TAG,)
    stops = ("<|eom_id|>", "<|eot_id|>")

    def __init__(self, source: str = ""):
        self._single = "single tool-call" in source  # the template refuses earlier turns with several

    @staticmethod
    def matches(source: str) -> bool:
        return TAG in source or ("<|start_header_id|>" in source and '"parameters": ' in source)

    def parser(self, tools: Tools | None, hidden: frozenset[str]) -> LlamaParser:
        return LlamaParser(tools, hidden)

    def calls(self, tools: Tools, tags: Tags) -> Lark:
        more = ' ("; " call)*' if tools.parallel and not self._single else ""
        return Lark("call" + more, f"call: {json_part(call_schema(tools, 'parameters'))}\n")

    def calls_or(self, rest: Lark, tools: Tools, tags: Tags) -> Lark:
        """The tag tells the two apart from the first token on: two grammars of JSON cannot be followed at once."""
        calls = self.calls(tools, tags)
        return Lark(f"{tags(TAG)} {calls.expression}", calls.rules).either(rest)

    def text_with_calls(self, tools: Tools, tags: Tags) -> Lark:
        calls = self.calls(tools, tags)
        return Lark(f"({calls.expression} | PLAIN)", calls.rules + "PLAIN: /([^{\\s](.|\\n)*)?/\n")
