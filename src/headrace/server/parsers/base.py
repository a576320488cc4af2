"""From a choice's text to what it says: content, reasoning and calls of tools. The base of every form's parser.

A parser is fed text as it comes and does a bounded amount of work for each character, so that no text can make it
slow. Arguments are passed on as the model wrote them, a stream's pieces adding up to what the whole answer has. What
turns out to be no call is content, byte for byte, but for special tokens that the request wants left out.
"""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.server.parsers.lark import Lark, Tags
from headrace.server.parsers.tools import Tools

MAX_HEAD = 512  # characters in which a call must have begun to show its arguments; else it is read when it is whole
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.){1,128}")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_OUTSIDE = re.compile(r'["{}\[\]]|[^\s\w,:+.-]')  # in JSON outside strings: what matters, or cannot be
_INSIDE = re.compile(r'["\\]')


@dataclass
class Pieces:
    """What text became: content, reasoning, and the `tool_calls` of a chunk's delta."""

    contents: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(self.contents)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasonings)

    def add(self, other: Pieces) -> None:
        self.contents += other.contents
        self.reasonings += other.reasonings
        self.calls += other.calls


class AnswerParser(ABC):
    """Splits one choice's text."""

    num_calls = 0
    thinking = False  # the text is inside reasoning now
    may_think = True  # it is, or may come to be

    @abstractmethod
    def feed(self, text: str) -> Pieces:
        """Take in more text."""

    @abstractmethod
    def finish(self) -> Pieces:
        """The text has ended."""


class PlainParser(AnswerParser):
    """All text is content."""

    def feed(self, text: str) -> Pieces:
        return Pieces([text])

    def finish(self) -> Pieces:
        return Pieces()


class ToolForm(ABC):
    """How a family of models writes calls."""

    name: str
    tags: tuple[str, ...]  # that the parser must see; where they are special tokens, they are kept in its text
    stops: tuple[str, ...] = ()  # tokens that end an answer in this form

    @staticmethod
    @abstractmethod
    def matches(source: str) -> bool:
        """Whether a chat template prints calls in this form."""

    @abstractmethod
    def parser(self, tools: Tools | None, hidden: frozenset[str]) -> AnswerParser:
        """For one choice. `hidden`: tags that are never shown as content."""

    @abstractmethod
    def calls(self, tools: Tools, tags: Tags) -> Lark:
        """The grammar of a call, or of one or more where the tools allow it."""

    @abstractmethod
    def text_with_calls(self, tools: Tools, tags: Tags) -> Lark:
        """The grammar of any answer whose calls, if there are any, are right."""

    def calls_or(self, rest: Lark, tools: Tools, tags: Tags) -> Lark:
        """The grammar of calls, or of an answer in a form of its own."""
        return self.calls(tools, tags).either(rest)


def partial(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a tag."""
    most = max((len(tag) for tag in tags), default=1) - 1
    for length in range(min(most, len(text)), 0, -1):
        end = text[-length:]
        if any(tag.startswith(end) for tag in tags):
            return length
    return 0


State = Callable[[str, Pieces], str]


class CallParser(AnswerParser):
    """A parser of text in which tags begin calls. A form adds its states: each takes text and returns what is left.

    Blanks before a call are no content; blanks are held until it is known what follows.
    """

    tags: tuple[str, ...]  # that begin a call

    def __init__(self, tools: Tools | None, hidden: frozenset[str] = frozenset()):
        self._tools = tools
        self._hidden = hidden
        self._pattern = re.compile("|".join(map(re.escape, self.tags)))
        self._state: State = self._outside
        self._held = ""  # what may be the beginning of a tag
        self._blanks: list[str] = []
        self._told = False  # the call being read was announced
        self.num_calls = 0

    def feed(self, text: str) -> Pieces:
        out = Pieces()
        text, self._held = self._held + text, ""
        while text:
            text = self._state(text, out)
        return out

    def finish(self) -> Pieces:
        out = Pieces()
        self._close(out)
        if self._held:
            self._show(self._held, out)
        elif self._blanks and not self.num_calls:
            self._show("", out)
        self._held = ""
        return out

    # -- for the forms

    @abstractmethod
    def _open(self, tag: str) -> State:
        """The state after a tag."""

    @abstractmethod
    def _close(self, out: Pieces) -> None:
        """The text has ended, maybe inside a call."""

    def _outside(self, text: str, out: Pieces) -> str:
        """Content up to a tag."""
        found = self._pattern.search(text)
        if found is not None:
            self._show_but_blanks(text[: found.start()], out)
            self._state = self._open(found[0])
            return text[found.end() :]
        keep = partial(text, self.tags)
        self._show_but_blanks(text[: len(text) - keep], out)
        self._held = text[len(text) - keep :]
        return ""

    def _show_but_blanks(self, text: str, out: Pieces) -> None:
        shown = text.rstrip()
        if shown:
            self._show(shown, out)
        if len(shown) < len(text):
            self._blanks.append(text[len(shown) :])

    def _show(self, text: str, out: Pieces) -> None:
        """Text is content, with the blanks before it."""
        out.contents += [*self._blanks, text]
        self._blanks.clear()

    def _show_unfinished(self, text: str, out: Pieces) -> None:
        """The beginning of a call that the end of the text cut short: content, unless nothing but calls may be."""
        if self._tools is None or not self._tools.forced:
            self._show(text, out)

    def _shown(self, tag: str) -> str:
        """A tag as content."""
        return "" if tag in self._hidden else tag

    def _drop_blanks(self) -> None:
        self._blanks.clear()

    def _start(self, name: str, out: Pieces) -> None:
        """A call begins; it is told unless one is all that may be."""
        self._drop_blanks()
        self._told = not self.num_calls or self._tools is None or self._tools.parallel
        if self._told:
            function = {"name": name, "arguments": ""}
            out.calls.append({"index": self.num_calls, "id": self._new_id(), "type": "function", "function": function})

    def _argue(self, text: str, out: Pieces) -> None:
        """More of its arguments."""
        if text and self._told:
            out.calls.append({"index": self.num_calls, "function": {"arguments": text}})

    def _object(self, call: ObjectCall, text: str, out: Pieces) -> tuple[str, bool]:
        """More of an object that may be a call, told as far as it is one: (what is behind it, whether a call ended)."""
        known = call.begun
        used, arguments = call.take(text)
        if call.begun and not known:
            self._start(call.name, out)
        self._argue(arguments, out)
        if not (call.done or call.broken):
            return "", False
        found = call.whole() if call.done and not call.begun else None
        if found is not None:
            self._start(found[0], out)
            self._argue(found[1], out)
        ended = call.begun or found is not None
        if ended:
            self._stop()
        return text[used:], ended

    def _stop(self) -> None:
        """It has ended."""
        self.num_calls += self._told
        self._told = False

    def _new_id(self) -> str:
        return f"call_{uuid.uuid4().hex[:24]}"


class JsonScanner:
    """Finds the end of a JSON object or list in text that comes in pieces."""

    def __init__(self, depth: int = 0):
        self._depth = depth
        self._string = self._escaped = False
        self.done = False
        self.broken = False  # what came is no JSON

    def take(self, text: str) -> int:
        """How many characters belong to it: all of them, unless it is done or broken then."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_INSIDE if self._string else _OUTSIDE).search(text, at)
            if found is None:
                self.broken = not (self._string or self._depth or text.isspace())
                return 0 if self.broken else len(text)
            mark, start = found[0], found.start()
            if not self._string and not self._depth and (mark not in "{[" or text[at:start].strip()):
                self.broken = True
                return at
            at = found.end()
            if mark == "\\" and self._string:
                self._escaped = True
            elif mark == '"':
                self._string = not self._string
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                if not self._depth:
                    self.done = True
                    return at
            else:
                self.broken = True
                return start
        return len(text)


class ObjectCall:
    """Reads one call written as a JSON object with a name and arguments. Arguments are given out as they come if the
    name is before them, else when the object is whole."""

    def __init__(self, names: frozenset[str] | None = None):
        """`names`: those of functions; None takes any."""
        self._names = names
        self._scanner = JsonScanner()
        self._rest = JsonScanner(depth=1)  # behind the arguments
        self._parts: list[str] = []
        self.length = 0  # characters of it, until it has begun
        self.name = ""
        self.begun = False  # the name is known and arguments come
        self.done = False
        self.broken = False

    @property
    def text(self) -> str:
        """All of it, as long as it has not begun."""
        return "".join(self._parts)

    def take(self, text: str) -> tuple[int, str]:
        """(how many characters belong to it, arguments)."""
        if self.begun:
            return self._arguments(text)
        used = self._scanner.take(text)
        self._parts.append(text[:used])
        self.length += used
        if self.length - used <= MAX_HEAD:
            whole = self.text
            self._parts = [whole]
            head = _HEAD.match(whole[: MAX_HEAD * 2])
            name = None if head is None else _string(head[1])
            if head is not None and name is not None and (self._names is None or name in self._names):
                self.name, self.begun, self._scanner = name, True, JsonScanner()
                rest = whole[head.end() :] + text[used:]
                consumed, piece = self._arguments(rest)
                return len(text) - (len(rest) - consumed), piece
        self.done, self.broken = self._scanner.done, self._scanner.broken
        return used, ""

    def _arguments(self, text: str) -> tuple[int, str]:
        used = 0
        if not self._scanner.done:
            used = self._scanner.take(text)
            if not self._scanner.done:
                self.broken = self._scanner.broken
                return used, text[:used]
        end = used + self._rest.take(text[used:])
        self.done, self.broken = self._rest.done, self._rest.broken
        return end, text[:used]

    def whole(self) -> tuple[str, str] | None:
        """Name and arguments of an object that is done and did not begin as usual; None if it is no call."""
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or not (self._names is None or name in self._names):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _string(text: str) -> str | None:
    try:
        return str(json.loads(text))
    except ValueError:
        return None


def joined_calls(pieces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a whole answer, from the pieces of a stream."""
    calls: list[dict[str, Any]] = []
    parts: list[list[str]] = []
    for piece in pieces:
        if "id" in piece:
            calls.append({"id": piece["id"], "type": "function", "function": dict(piece["function"])})
            parts.append([piece["function"]["arguments"]])
        else:
            parts[-1].append(piece["function"]["arguments"])
    for call, texts in zip(calls, parts, strict=True):
        call["function"]["arguments"] = "".join(texts)
    return calls
