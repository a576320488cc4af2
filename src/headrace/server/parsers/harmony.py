"""Answers as GPT-OSS writes them (OpenAI's "harmony" form): messages, each with a header that names its channel.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>
    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{arguments}<|call|>

The header of the first message began in the prompt. Messages of the commentary that call nothing are content.
"""

from __future__ import annotations

import re
from enum import Enum

from headrace.server.parsers.base import AnswerParser, CallParser, Pieces, State, ToolForm
from headrace.server.parsers.lark import ANY, Lark, Tags, json_part
from headrace.server.parsers.tools import Tools

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
_ENDS = (END, RETURN, CALL, START)
_MAX_HEADER = 512  # characters
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADER = re.compile(r"\s*(?:<\||to=)")
FUNCTIONS = "functions."


class Kind(Enum):
    """What the text of a message is."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"


class HarmonyParser(CallParser):
    tags = (MESSAGE,)  # ends a header

    def __init__(self, tools: Tools | None, hidden: frozenset[str] = frozenset(), begun: str = ""):
        """`begun`: the header and text of the message that the prompt left unfinished."""
        super().__init__(tools, hidden)
        self._ends = re.compile("|".join(map(re.escape, _ENDS)))
        self._header = ""
        self._kind = Kind.CONTENT
        self._gap = {Kind.CONTENT: "", Kind.REASONING: ""}  # before the next message of a kind
        self._state = self._beginning
        if MESSAGE in begun:
            self._header = begun[: begun.index(MESSAGE)]
            self._state = self._enter(Pieces())

    @property
    def thinking(self) -> bool:  # type: ignore[override]
        return self._kind == Kind.REASONING

    def _beginning(self, text: str, out: Pieces) -> str:
        """The first message: text without a header is content."""
        head = self._header + text
        if _HEADER.match(head):
            self._header, self._state = "", self._in_header
            return head
        if not head.strip() or any(each.startswith(head.strip()) for each in ("<|", "to=")):
            self._header = head
            return ""
        self._header, self._state = "", self._inside
        return head

    def _in_header(self, text: str, out: Pieces) -> str:
        head = self._header + text
        end = head.find(MESSAGE)
        if end < 0 and len(head) > _MAX_HEADER:
            self._header, self._state = "", self._inside
            out.contents.append(head)
            return ""
        if end < 0:
            self._header = head
            return ""
        self._header = head[:end]
        self._state = self._enter(out)
        return head[end + len(MESSAGE) :]

    def _enter(self, out: Pieces) -> State:
        """A message whose header is known."""
        recipient, channel = _RECIPIENT.search(self._header), _CHANNEL.search(self._header)
        self._header = ""
        name = "" if recipient is None else recipient[1]
        function = name.startswith(FUNCTIONS) or (self._tools is not None and name in self._tools.names)
        if function:
            self._kind = Kind.CALL
            self._start(name.removeprefix(FUNCTIONS), out)
        elif name or (channel is not None and channel[1] == "analysis"):  # what is for a tool of its own is no answer
            self._kind = Kind.REASONING
        else:
            self._kind = Kind.CONTENT
        return self._inside

    def _inside(self, text: str, out: Pieces) -> str:
        found = self._ends.search(text)
        if found is None:
            keep = _partial_end(text)
            self._say(text[: len(text) - keep], out)
            self._held = text[len(text) - keep :]
            return ""
        self._say(text[: found.start()], out)
        self._leave()
        self._state = self._in_header
        return text[found.end() :]

    def _say(self, text: str, out: Pieces) -> None:
        if not text:
            return
        if self._kind == Kind.CALL:
            self._argue(text, out)
            return
        parts = out.contents if self._kind == Kind.CONTENT else out.reasonings
        parts += [self._gap[self._kind], text]
        self._gap[self._kind] = ""

    def _leave(self) -> None:
        if self._kind == Kind.CALL:
            self._stop()
        else:
            self._gap[self._kind] = "\n"
        self._kind = Kind.CONTENT

    def _open(self, tag: str) -> State:
        return self._inside

    def _close(self, out: Pieces) -> None:
        if self._state == self._inside:
            self._say(self._held, out)
            self._held = ""
            self._leave()
        elif self._state == self._beginning:
            out.contents.append(self._header)
        self._header = ""


def _partial_end(text: str) -> int:
    at = text.rfind("<", max(0, len(text) - len(CALL) - 3))
    end = text[at:] if at >= 0 else ""
    return len(end) if end and any(tag.startswith(end) for tag in _ENDS) else 0


class Harmony(ToolForm):
    name = "harmony"
    tags = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)
    stops = (RETURN, CALL)

    @staticmethod
    def matches(source: str) -> bool:
        return CHANNEL in source and MESSAGE in source

    def parser(self, tools: Tools | None, hidden: frozenset[str], begun: str = "") -> AnswerParser:
        return HarmonyParser(tools, hidden, begun)

    def begun(self, prompt: str) -> str:
        """What a rendered prompt says of the message that it leaves unfinished."""
        last = prompt[prompt.rfind(START) :] if START in prompt else ""
        return "" if any(end in last for end in (END, RETURN, CALL)) else last

    def calls(self, tools: Tools, tags: Tags) -> Lark:
        json_body = f'{tags(CONSTRAIN)} "json" {tags(MESSAGE)}'
        parts = [
            f'{tags(CHANNEL)} "commentary to={FUNCTIONS}{name} " {json_body} arguments_{index}'
            for index, (name, _) in enumerate(tools.schemas())
        ]
        rules = [f"arguments_{index}: {json_part(schema)}\n" for index, (_, schema) in enumerate(tools.schemas())]
        return Lark(f"({' | '.join(parts)})", "".join(rules))

    def final(self, tags: Tags, rest: Lark) -> Lark:
        """An answer whose text is `rest`."""
        return rest.after(f'{tags(CHANNEL)} "final" (" "? {tags(CONSTRAIN)} "json")? {tags(MESSAGE)}')

    def text_with_calls(self, tools: Tools, tags: Tags) -> Lark:
        free = self.final(tags, Lark("FINAL", f"FINAL: {ANY}\n"))
        return self.calls(tools, tags).either(free)

    def after_analysis(self, tags: Tags, rest: Lark, preamble: bool) -> Lark:
        """`rest` behind reasoning; `preamble`: and maybe a word to the user."""
        rules = (
            f'analysis: {tags(CHANNEL)} "analysis" {tags(MESSAGE)} ANALYSIS {tags(END)} {tags(START)} "assistant"\n'
            f'preamble: {tags(CHANNEL)} "commentary" {tags(MESSAGE)} ANALYSIS {tags(END)} {tags(START)} "assistant"\n'
            f"ANALYSIS: {ANY}\n"
        )
        return rest.after("(analysis | preamble)*" if preamble else "analysis*", rules)
