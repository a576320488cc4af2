"""Reasoning between tags, as <think> ... </think>, before the answer."""

from __future__ import annotations

from enum import Enum

from headrace.server.parsers.base import AnswerParser, Pieces, partial
from headrace.server.parsers.lark import Lark, Tags

PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
MAX_BLANKS = 64  # characters before an answer, behind which a closing tag is looked for


class Beginning(Enum):
    """Where the prompt leaves the answer."""

    OPEN = "open"  # inside reasoning
    ANSWER = "answer"  # behind it, or without any
    FREE = "free"  # the model may begin with reasoning


class Thinking:
    """A pair of tags."""

    def __init__(self, opening: str, closing: str):
        self.opening, self.closing = opening, closing

    @classmethod
    def of(cls, source: str) -> Thinking | None:
        """That of a chat template."""
        return next((cls(*pair) for pair in PAIRS if pair[1] in source), None)

    def beginning(self, prompt: str, continued: bool) -> Beginning:
        """How a rendered prompt ends. `continued`: inside an answer, which may hold tags."""
        end = prompt.rstrip()
        if end.endswith(self.opening):
            return Beginning.OPEN
        if end.endswith(self.closing):
            return Beginning.ANSWER
        if not continued:
            return Beginning.FREE
        return Beginning.OPEN if prompt.rfind(self.opening) > prompt.rfind(self.closing) else Beginning.ANSWER

    def grammar(self, beginning: Beginning, tags: Tags, rest: Lark) -> Lark:
        """`rest` behind reasoning."""
        if beginning == Beginning.ANSWER:
            return rest
        thought, rules = tags.text_before(self.closing, "thought")
        blanks = r"THINKBLANKS: /[ \t\r\n]{0,4}/" + "\n"
        if beginning == Beginning.OPEN:
            return rest.after(f"{thought} THINKBLANKS", rules + blanks)
        rules += f"thinking: {tags(self.opening)} {thought} THINKBLANKS\n"
        return rest.after("thinking?", rules + blanks)


class ThinkingParser(AnswerParser):
    """Reasoning, then what `inner` makes of the rest. Blanks at the ends of the reasoning and before the answer belong
    to neither, nor does a closing tag that the model says again before the answer."""

    def __init__(self, tags: Thinking, beginning: Beginning, inner: AnswerParser):
        self._tags = tags
        self._inner = inner
        self._undecided = beginning == Beginning.FREE
        self._closed = beginning == Beginning.ANSWER  # reasoning was closed by the prompt
        self.thinking = beginning == Beginning.OPEN
        self._begun = False  # something but blanks came since the last tag
        self._thought = beginning == Beginning.OPEN  # there is or was reasoning
        self._held = ""
        self._blanks: list[str] = []

    @property
    def num_calls(self) -> int:  # type: ignore[override]
        return self._inner.num_calls

    @property
    def may_think(self) -> bool:  # type: ignore[override]
        return self.thinking or self._undecided

    def feed(self, text: str) -> Pieces:
        out = Pieces()
        text, self._held = self._held + text, ""
        if self._undecided:
            text = self._decide(text)
        if self.thinking:
            text = self._think(text, out)
        if text and not self.thinking and not self._undecided:
            self._answer(text, out)
        return out

    def finish(self) -> Pieces:
        out = Pieces()
        if self.thinking and self._held:
            out.reasonings += [*self._blanks, self._held]
        elif self._undecided:
            self._undecided = False
            out.add(self._inner.feed("".join(self._blanks) + self._held))
        elif self._held:
            out.add(self._inner.feed(self._held))
        self._held = ""
        out.add(self._inner.finish())
        return out

    def _decide(self, text: str) -> str:
        stripped = text.lstrip()
        if stripped.startswith(self._tags.opening):
            self._undecided, self.thinking, self._thought = False, True, True
            self._blanks.clear()
            return stripped[len(self._tags.opening) :]
        if self._tags.opening.startswith(stripped):
            self._blanks.append(text[: len(text) - len(stripped)])
            self._held = stripped
            return ""
        self._undecided = False
        blanks = "".join(self._blanks)
        self._blanks.clear()
        return blanks + text

    def _think(self, text: str, out: Pieces) -> str:
        """Reasoning up to the closing tag; returns what is behind it."""
        end = text.find(self._tags.closing)
        keep = partial(text, (self._tags.closing,)) if end < 0 else 0
        thought = text[: len(text) - keep] if end < 0 else text[:end]
        if not self._begun:
            thought = thought.lstrip()
        shown = thought.rstrip()
        if shown:
            out.reasonings += [*self._blanks, shown]
            self._blanks.clear()
            self._begun = True
        if len(shown) < len(thought):
            self._blanks.append(thought[len(shown) :])
        if end < 0:
            self._held = text[len(text) - keep :] if keep else ""
            return ""
        self.thinking = self._begun = False
        self._blanks.clear()
        return text[end + len(self._tags.closing) :]

    def _answer(self, text: str, out: Pieces) -> None:
        if not self._begun and (self._thought or self._closed):
            text = self._behind_closing(text)
        if text:
            self._begun = True
            out.add(self._inner.feed(text))

    def _behind_closing(self, text: str) -> str:
        """What the answer begins with; what may yet become a closing tag is held."""
        closing, rest = self._tags.closing, text.lstrip()
        if not self._thought and len(text) - len(rest) > MAX_BLANKS:
            return text
        while rest.startswith(closing):
            self._thought = True
            rest = rest[len(closing) :].lstrip()
        kept = rest if self._thought else text
        if closing.startswith(rest):
            self._held = kept
            return ""
        return kept
