"""Endpoint: an API whose requests become chats or completions, and whose answers have a shape of their own."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.server.errors import ApiError
from headrace.server.http import ErrorShape

if TYPE_CHECKING:
    from headrace.frontend.tokenizer import Tokenizer
    from headrace.server.job import Delta, Job
    from headrace.server.service import Service


class AnswerShape(ABC):
    """How one answer is written, whole or as a stream."""

    errors: ErrorShape | None = None  # how one ends its stream, where that is not the endpoint's way

    @abstractmethod
    def body(self) -> bytes:
        """The whole answer of a job that has ended."""

    @abstractmethod
    def opening(self) -> Iterator[bytes]:
        """Events before any text."""

    @abstractmethod
    def chunk(self, delta: Delta, first: bool) -> bytes:
        """The events of a delta; b"" where there is nothing to tell. `first`: the first of its choice."""

    @abstractmethod
    def closing(self) -> bytes:
        """The events after the last delta, to the end of the stream."""


@dataclass(frozen=True)
class Translated:
    """A request as a body of chat or completions."""

    body: Mapping[str, Any]
    ignored: tuple[str, ...] = ()  # fields that nobody knows, or that cannot be honoured and need not
    notes: Mapping[str, Any] = field(default_factory=dict)  # for the shape
    size: int = 0  # bytes, about, if it is larger than what came


class Endpoint(ABC):
    """One route that generates."""

    route: str  # its name in metrics and the log
    url: str  # CHAT or COMPLETIONS: what the bodies are checked as
    prefix: str  # of the ids of answers
    errors: ErrorShape = ErrorShape()
    renamed: Mapping[str, str] = {}  # fields of chat -> what they are called here

    def new_id(self) -> str:
        return self.prefix + uuid.uuid4().hex

    def translate(self, service: Service, value: Mapping[str, Any], caller: str | None) -> Translated:
        """ApiError 400 names the field at fault."""
        return Translated(value)

    @abstractmethod
    def shape(self, job: Job, model: str, tokenizer: Tokenizer, notes: Mapping[str, Any]) -> AnswerShape:
        """Of the answer to a job."""

    def finished(self, service: Service, shape: AnswerShape, caller: str | None) -> None:  # noqa: B027
        """An answer has been made in whole."""

    def in_own_words(self, error: ApiError) -> ApiError:
        """An error about a field, under the name that the field has here."""
        own = self.renamed.get(error.param or "")
        if own is not None and error.param is not None:
            error.message = error.message.replace(error.param, own)
            error.param = own
        return error
