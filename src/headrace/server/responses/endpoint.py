"""/v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.frontend.openai_request import CHAT
from headrace.frontend.tokenizer import Tokenizer
from headrace.server.endpoint import AnswerShape, Endpoint, Translated
from headrace.server.errors import ApiError
from headrace.server.http import Exchange, encode_json
from headrace.server.job import Job
from headrace.server.responses.request import chat_body, messages_of
from headrace.server.responses.shape import ResponsesShape
from headrace.server.responses.store import Stored
from headrace.server.service import Service

PATH = "/v1/responses"


class Responses(Endpoint):
    route, url, prefix = "responses", CHAT, "resp_"
    renamed = {  # noqa: RUF012
        "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens", "messages": "input",
        "response_format": "text", "reasoning_effort": "reasoning",
    }  # fmt: skip

    def translate(self, service: Service, value: Mapping[str, Any], caller: str | None) -> Translated:
        body, ignored = chat_body(value)
        messages: list[Mapping[str, Any]] = []
        previous = value.get("previous_response_id")
        size = 0
        if previous is not None:
            stored = self._stored(service, previous, caller, "previous_response_id", 400)
            messages, size = list(stored.messages), stored.size
        messages += messages_of(value.get("input"))
        instructions = value.get("instructions")
        before = [{"role": "system", "content": instructions}] if instructions else []
        notes = {**value, "messages": messages}
        return Translated({**body, "messages": [*before, *messages]}, tuple(ignored), notes, size)

    def shape(self, job: Job, model: str, tokenizer: Tokenizer, notes: Mapping[str, Any]) -> ResponsesShape:
        return ResponsesShape(job, model, tokenizer, notes)

    def finished(self, service: Service, shape: AnswerShape, caller: str | None) -> None:
        assert isinstance(shape, ResponsesShape)
        if shape.whole is None or not shape.stored:
            return
        messages = [*shape.conversation, shape.message()]
        size = len(shape.whole) + len(encode_json(messages))
        service.responses.put(shape.id, Stored(shape.whole, messages, caller, size))

    @staticmethod
    def _stored(service: Service, response_id: str, caller: str | None, param: str | None, status: int) -> Stored:
        found = service.responses.get(response_id, caller)
        if found is None:
            raise ApiError(
                status, f"no response {response_id[:100]!r} is kept here; old ones are dropped", param=param,
                code="previous_response_not_found" if param else "not_found",
            )  # fmt: skip
        return found

    async def stored(self, service: Service, exchange: Exchange, response_id: str, caller: str | None) -> None:
        """GET and DELETE of an answer."""
        found = self._stored(service, response_id, caller, None, 404)
        if exchange.method == "DELETE":
            service.responses.drop(response_id, caller)
            await exchange.answer(encode_json({"id": response_id, "object": "response.deleted", "deleted": True}))
        else:
            await exchange.answer(found.body)


RESPONSES = Responses()
