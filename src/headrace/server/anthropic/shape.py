"""Answers of Anthropic's /v1/messages: a message of content blocks, whole or told by typed events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.frontend.tokenizer import Tokenizer
from headrace.server.blocks import Block, BlockShape, named_event
from headrace.server.errors import ApiError
from headrace.server.http import ErrorShape, encode_json
from headrace.server.job import Job

_ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class AnthropicErrors(ErrorShape):
    """{"type": "error", "error": {"type", "message"}}; a stream ends with it as an event."""

    def value(self, error: ApiError) -> dict[str, Any]:
        kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {**error.body["error"], "type": kind}}

    def body(self, error: ApiError) -> bytes:
        return encode_json(self.value(error))

    def event(self, error: ApiError) -> bytes:
        return named_event(self.value(error))


class MessagesShape(BlockShape):
    def __init__(self, job: Job, model: str, tokenizer: Tokenizer, notes: Mapping[str, Any]):
        super().__init__(job, tokenizer)
        self._model = model
        self._stops = notes.get("stop_sequences") or []

    def body(self) -> bytes:
        self._read()
        content = [self._content(block) for block in self.blocks if block.kind != "text" or block.text]
        return encode_json({**self._message(content), **self._reason(), "usage": self._usage()})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._job.id, "type": "message", "role": "assistant", "model": self._model, "content": content,
            "stop_reason": None, "stop_sequence": None,
        }  # fmt: skip

    def _reason(self) -> dict[str, Any]:
        choice = self._job.outputs[0].outputs[0]
        sequence = choice.stop_reason if choice.stop_reason in self._stops else None
        if self._finish_reason == "length":
            reason = "max_tokens"
        elif any(block.kind == "call" for block in self.blocks):
            reason = "tool_use"
        else:
            reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        """Tokens of the prompt that were in the prefix cache count apart, as Anthropic counts them."""
        cached = self._job.cached_tokens
        return {
            "input_tokens": len(self._job.prompts[0].token_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._job.completion_tokens,
        }

    def _content(self, block: Block, *, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else block.text
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        if block.kind == "text":
            return {"type": "text", "text": text}
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {} if empty else _object(text)}

    # -- the stream

    def opening(self) -> Iterator[bytes]:
        usage = {
            "input_tokens": len(self._job.prompts[0].token_ids), "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0, "output_tokens": 0,
        }  # fmt: skip
        yield named_event({"type": "message_start", "message": {**self._message([]), "usage": usage}})

    def _begin(self, block: Block, index: int) -> Iterator[bytes]:
        content = self._content(block, empty=True)
        yield named_event({"type": "content_block_start", "index": index, "content_block": content})

    def _grow(self, block: Block, index: int, text: str, logprobs: list[dict[str, Any]]) -> Iterator[bytes]:
        if block.kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": text}
        elif block.kind == "text":
            delta = {"type": "text_delta", "text": text}
        else:
            delta = {"type": "input_json_delta", "partial_json": text}
        yield named_event({"type": "content_block_delta", "index": index, "delta": delta})

    def _end(self, block: Block, index: int) -> Iterator[bytes]:
        yield named_event({"type": "content_block_stop", "index": index})

    def closing(self) -> bytes:
        told = {"type": "message_delta", "delta": self._reason(), "usage": self._usage()}
        return named_event(told) + named_event({"type": "message_stop"})


def _object(text: str) -> dict[str, Any]:
    """Arguments as an object; those that are none, or were cut short, as text under a name of their own."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"_unparsed": text}
