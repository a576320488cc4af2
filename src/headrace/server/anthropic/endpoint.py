"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.frontend.openai_request import CHAT
from headrace.frontend.tokenizer import Tokenizer
from headrace.server.anthropic.request import chat_body
from headrace.server.anthropic.shape import AnthropicErrors, MessagesShape
from headrace.server.endpoint import Endpoint, Translated
from headrace.server.job import Job
from headrace.server.service import Service

PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"


class Messages(Endpoint):
    route, url, prefix = "messages", CHAT, "msg_"
    errors = AnthropicErrors()
    renamed = {  # noqa: RUF012
        "stop": "stop_sequences", "max_completion_tokens": "max_tokens", "response_format": "output_config",
        "reasoning_effort": "output_config",
    }  # fmt: skip

    def translate(self, service: Service, value: Mapping[str, Any], caller: str | None) -> Translated:
        body, ignored = chat_body(value, service.model.template.sources)
        return Translated(body, tuple(ignored), value)

    def shape(self, job: Job, model: str, tokenizer: Tokenizer, notes: Mapping[str, Any]) -> MessagesShape:
        return MessagesShape(job, model, tokenizer, notes)


class CountTokens(Messages):
    """The prompt alone."""

    def translate(self, service: Service, value: Mapping[str, Any], caller: str | None) -> Translated:
        body, ignored = chat_body(value, service.model.template.sources, counting=True)
        return Translated(body, tuple(ignored), value)


MESSAGES, COUNT = Messages(), CountTokens()
