"""Answers of /v1/responses: an object with output items, whole or told by typed events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.frontend.tokenizer import Tokenizer
from headrace.server.blocks import Block, BlockShape, named_event
from headrace.server.errors import ApiError
from headrace.server.http import ErrorShape, encode_json
from headrace.server.job import Job

_PREFIX = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}


class _Errors(ErrorShape):
    """Errors within a stream are events, numbered as the others."""

    def __init__(self, shape: ResponsesShape):
        self._shape = shape

    def event(self, error: ApiError) -> bytes:
        told = {"type": "error", "code": error.code or error.body["error"]["type"], "message": error.message,
                "param": error.param, "sequence_number": self._shape.next_number()}  # fmt: skip
        return named_event(told)


class ResponsesShape(BlockShape):
    def __init__(self, job: Job, model: str, tokenizer: Tokenizer, notes: Mapping[str, Any]):
        """`notes`: the request's own fields, as they came."""
        super().__init__(job, tokenizer)
        self._model = model
        self._given = notes
        self._created = time.time()
        self._sequence = 0
        self.errors = _Errors(self)
        self._ids: list[str] = []  # of the items
        self._whole: bytes | None = None  # of the finished answer

    @property
    def whole(self) -> bytes | None:
        """The finished answer, once there is one."""
        return self._whole

    @property
    def id(self) -> str:
        return self._job.id

    @property
    def stored(self) -> bool:
        """Whether it is to be kept."""
        return self._given.get("store") is not False

    @property
    def conversation(self) -> list[Mapping[str, Any]]:
        """Up to this answer."""
        return list(self._given["messages"])

    def body(self) -> bytes:
        self._read()
        self._ids = [self._new_id(block) for block in self.blocks]
        self._whole = encode_json(self._response(ended=True))
        return self._whole

    @staticmethod
    def _new_id(block: Block) -> str:
        return _PREFIX[block.kind] + uuid.uuid4().hex

    # -- objects

    def _response(self, *, ended: bool) -> dict[str, Any]:
        given, params = self._given, self._job.request.params
        cut = ended and self._finish_reason == "length"
        status = "incomplete" if cut else "completed" if ended else "in_progress"
        last = len(self.blocks) - 1
        items = [
            self._item(block, index, "incomplete" if cut and index == last else "completed")
            for index, block in enumerate(self.blocks)
        ]
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": int(self._created),
            "completed_at": int(time.time()) if ended and not cut else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "max_tool_calls": None,
            "model": self._model,
            "output": items if ended else [],
            "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
            "previous_response_id": given.get("previous_response_id"),
            "reasoning": {"effort": None, "summary": None, **(given.get("reasoning") or {})},
            "service_tier": "default",
            "store": given.get("store") is not False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **_not_null(given.get("text"))},
            "tool_choice": given.get("tool_choice") or "auto",
            "tools": given.get("tools") or [],
            "top_logprobs": given.get("top_logprobs") or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
            "user": given.get("user"),
            "metadata": given.get("metadata") or {},
        }

    def _usage(self) -> dict[str, Any]:
        prompt, output = len(self._job.prompts[0].token_ids), self._job.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._job.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": self._job.reasoning_tokens},
            "total_tokens": prompt + output,
        }

    def _item(self, block: Block, index: int, status: str, *, empty: bool = False) -> dict[str, Any]:
        common = {"id": self._ids[index], "status": status}
        if block.kind == "reasoning":
            content = [] if empty else [self._part(block)]
            return {**common, "type": "reasoning", "summary": [], "content": content}
        if block.kind == "text":
            return {**common, "type": "message", "role": "assistant", "content": [] if empty else [self._part(block)]}
        arguments = "" if empty else block.text
        return {**common, "type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": arguments}

    @staticmethod
    def _part(block: Block, *, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else block.text
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [] if empty else block.logprobs}

    # -- the stream

    def _event(self, kind: str, **fields: Any) -> bytes:
        return named_event({"type": f"response.{kind}", "sequence_number": self.next_number(), **fields})

    def next_number(self) -> int:
        """Of an event."""
        self._sequence += 1
        return self._sequence - 1

    def opening(self) -> Iterator[bytes]:
        response = self._response(ended=False)
        yield self._event("created", response=response)
        yield self._event("in_progress", response=response)

    def _begin(self, block: Block, index: int) -> Iterator[bytes]:
        self._ids.append(self._new_id(block))
        item = self._item(block, index, "in_progress", empty=True)
        yield self._event("output_item.added", output_index=index, item=item)
        if block.kind != "call":
            yield self._event("content_part.added", **self._place(index), part=self._part(block, empty=True))

    def _place(self, index: int) -> dict[str, Any]:
        return {"item_id": self._ids[index], "output_index": index, "content_index": 0}

    def _grow(self, block: Block, index: int, text: str, logprobs: list[dict[str, Any]]) -> Iterator[bytes]:
        if block.kind == "text":
            yield self._event("output_text.delta", **self._place(index), delta=text, logprobs=logprobs)
        elif block.kind == "reasoning":
            yield self._event("reasoning_text.delta", **self._place(index), delta=text)
        else:
            item = self._ids[index]
            yield self._event("function_call_arguments.delta", item_id=item, output_index=index, delta=text)

    def _end(self, block: Block, index: int) -> Iterator[bytes]:
        text, place = block.text, self._place(index)
        if block.kind == "text":
            yield self._event("output_text.done", **place, text=text, logprobs=block.logprobs)
        elif block.kind == "reasoning":
            yield self._event("reasoning_text.done", **place, text=text)
        else:
            yield self._event(
                "function_call_arguments.done", item_id=self._ids[index], output_index=index, name=block.name,
                arguments=text,
            )  # fmt: skip
        if block.kind != "call":
            yield self._event("content_part.done", **place, part=self._part(block))
        cut = self._job.outcome == "length" and block is self.blocks[-1]
        item = self._item(block, index, "incomplete" if cut else "completed")
        yield self._event("output_item.done", output_index=index, item=item)

    def closing(self) -> bytes:
        response = self._response(ended=True)
        self._whole = encode_json(response)
        return self._event("incomplete" if response["status"] == "incomplete" else "completed", response=response)


def _not_null(value: Any) -> dict[str, Any]:
    return {name: each for name, each in (value or {}).items() if each is not None}
