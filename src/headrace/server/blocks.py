"""Answers as a row of blocks, each of reasoning, text or a call: what Responses and Messages have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.frontend.tokenizer import Tokenizer
from headrace.server.endpoint import AnswerShape
from headrace.server.http import encode_json
from headrace.server.job import Delta, Job
from headrace.server.parsers.base import Pieces
from headrace.server.shapes import ChatLogprobs

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """`text` is that of a call's arguments too."""

    kind: Kind
    parts: list[str] = field(default_factory=list)
    name: str = ""  # of a call
    call_id: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # of text

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockShape(AnswerShape):
    """Of a job with one choice. A form says how blocks begin, grow and end in its stream."""

    def __init__(self, job: Job, tokenizer: Tokenizer):
        assert job.request.plan is not None
        self._job = job
        self._tokenizer = tokenizer
        self._parser = job.request.plan.parser()
        self._logprobs = ChatLogprobs(tokenizer, job.request)
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._untold: list[dict[str, Any]] = []  # logprobs of tokens that had no text

    # -- for the forms

    @abstractmethod
    def _begin(self, block: Block, index: int) -> Iterator[bytes]:
        """Events of a block that begins."""

    @abstractmethod
    def _grow(self, block: Block, index: int, text: str, logprobs: list[dict[str, Any]]) -> Iterator[bytes]:
        """Events of more of it."""

    @abstractmethod
    def _end(self, block: Block, index: int) -> Iterator[bytes]:
        """Events of its end."""

    # -- the stream

    def chunk(self, delta: Delta, first: bool) -> bytes:
        if delta.logprobs is not None:
            self._untold += self._logprobs.take(delta.token_ids, delta.logprobs)["content"]
        pieces = self._pieces(delta.text, delta.finish_reason is not None)
        events = list(self._take(pieces))
        if delta.finish_reason is not None:
            last = next((block for block in reversed(self.blocks) if block.kind == "text"), None)
            if last is not None:
                last.logprobs += self._untold
        if delta.finish_reason is not None and self._open is not None:
            events += self._end(self._open, len(self.blocks) - 1)
            self._open = None
        return b"".join(events)

    def _pieces(self, text: str, ended: bool) -> Pieces:
        pieces = self._parser.feed(text)
        if ended:
            pieces.add(self._parser.finish())
        if not self._job.request.reasoning:
            pieces.reasonings.clear()
        return pieces

    def _take(self, pieces: Pieces) -> Iterator[bytes]:
        texts: tuple[tuple[Kind, str], ...] = (("reasoning", pieces.reasoning), ("text", pieces.content))
        for kind, text in texts:
            if text:
                entries: list[dict[str, Any]] = []
                if kind == "text":
                    entries, self._untold = self._untold, []
                if self._open is None or self._open.kind != kind:
                    yield from self._switch(Block(kind))
                yield from self._more(text, entries)
        for piece in pieces.calls:
            function = piece["function"]
            if "id" in piece:
                yield from self._switch(Block("call", name=function["name"], call_id=piece["id"]))
            if function["arguments"]:
                yield from self._more(function["arguments"], [])

    def _switch(self, block: Block) -> Iterator[bytes]:
        if self._open is not None:
            yield from self._end(self._open, len(self.blocks) - 1)
        self.blocks.append(block)
        self._open = block
        yield from self._begin(block, len(self.blocks) - 1)

    def _more(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[bytes]:
        block = self._open
        assert block is not None
        block.parts.append(text)
        block.logprobs += logprobs
        yield from self._grow(block, len(self.blocks) - 1, text, logprobs)

    # -- the whole

    def _read(self) -> None:
        """The blocks of a whole answer."""
        (choice,) = self._job.outputs[0].outputs
        pieces = self._pieces(choice.text, True)
        if pieces.reasoning:
            self.blocks.append(Block("reasoning", [pieces.reasoning]))
        if pieces.content or not pieces.calls:
            logprobs = []
            if choice.logprobs is not None:
                logprobs = self._logprobs.take(choice.token_ids, choice.logprobs)["content"]
            self.blocks.append(Block("text", [pieces.content], logprobs=logprobs))
        for piece in pieces.calls:
            function = piece["function"]
            if "id" in piece:
                self.blocks.append(Block("call", name=function["name"], call_id=piece["id"]))
            self.blocks[-1].parts.append(function["arguments"])

    @property
    def _finish_reason(self) -> str:
        return str(self._job.outputs[0].outputs[0].finish_reason)

    def message(self) -> dict[str, Any]:
        """The answer as a message of a chat, for a next turn."""
        content = "".join(block.text for block in self.blocks if block.kind == "text")
        reasoning = "".join(block.text for block in self.blocks if block.kind == "reasoning")
        calls = [
            {"id": each.call_id, "type": "function", "function": {"name": each.name, "arguments": each.text}}
            for each in self.blocks
            if each.kind == "call"
        ]
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message


def named_event(value: dict[str, Any]) -> bytes:
    """A server-sent event named by its `type`."""
    return b"event: " + value["type"].encode() + b"\ndata: " + encode_json(value) + b"\n\n"
