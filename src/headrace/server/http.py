"""One HTTP exchange over ASGI: the body within limits, one JSON answer or a stream of server-sent events.

Written on ASGI itself: what a framework would add is routing and validation, and both are the API's own here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

import msgspec

from headrace.server.errors import ApiError, bad_request

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

encode_json = msgspec.json.Encoder().encode  # strict JSON: a number that is not finite becomes null
_decode_json = msgspec.json.Decoder().decode
DONE = b"data: [DONE]\n\n"


class ErrorShape:
    """How an API writes errors; this is OpenAI's way."""

    def body(self, error: ApiError) -> bytes:
        return encode_json(error.body)

    def event(self, error: ApiError) -> bytes:
        """The end of a stream that has begun."""
        return event(encode_json(error.body)) + DONE


class ClientGoneError(Exception):
    """The client closed the connection."""


class Exchange:
    """A request and its response. Headers are lower case."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        self.query: bytes = scope.get("query_string", b"")
        self.extra_headers: dict[str, str] = {}  # sent with whatever answer
        self.caller: str | None = None  # where there are API keys: who sent it
        self.status = 0  # once the answer has begun
        self.finished = False
        self.errors = ErrorShape()
        self._receive = receive
        self._send = send
        self._watch: asyncio.Task[None] | None = None

    # -- the request

    async def body(self, limit: int, seconds: float) -> bytes:
        """The whole body. ApiError 413 above `limit` bytes, 408 when it takes longer than `seconds`."""
        length = self.headers.get("content-length", "")
        if length and "transfer-encoding" in self.headers:  # what a proxy before this server may read otherwise
            raise ApiError(
                400, "content-length and transfer-encoding exclude each other", headers={"connection": "close"}
            )
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(seconds):
                return await self._read(limit)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {seconds:g} s", headers={"connection": "close"}
            ) from None

    async def _read(self, limit: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def json(self, limit: int, seconds: float) -> tuple[dict[str, Any], int]:
        """The body as an object, and its bytes; ApiError 415 or 400 for anything else."""
        kind = self.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise ApiError(415, f"the body must be application/json, not {kind[:80] or 'of no type'}")
        data = await self.body(limit, seconds)
        try:
            value = _decode_json(data)
        except RecursionError:
            raise bad_request("the body is nested too deeply") from None
        except (msgspec.DecodeError, ValueError) as error:
            raise bad_request(f"the body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise bad_request("the body must be a JSON object")
        return value, len(data)

    # -- the connection

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Once the body has been read: call `on_gone` if the client goes before the answer is finished."""

        async def wait() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if not self.finished:
                on_gone()

        self._watch = asyncio.get_running_loop().create_task(wait())

    def close(self) -> None:
        """Nobody watches the client any more."""
        self.finished = True
        if self._watch is not None:
            self._watch.cancel()

    # -- the response

    async def start(self, status: int, kind: str, headers: Mapping[str, str] | None = None, length: int = -1) -> None:
        known = {"content-type": kind, **self.extra_headers, **(headers or {})}
        if length >= 0:
            known["content-length"] = str(length)
        pairs = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in known.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})
        self.status = status

    async def write(self, data: bytes) -> None:
        """A part of the response; waits while the client has too much to read already."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        self.finished = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(
        self, data: bytes, kind: str = "application/json", status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """The whole response at once."""
        await self.start(status, kind, headers, len(data))
        await self.finish(b"" if self.method == "HEAD" else data)

    async def answer_json(self, value: Any, status: int = 200) -> None:
        await self.answer(encode_json(value), status=status)

    async def start_events(self) -> None:
        await self.start(200, "text/event-stream", {"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def fail(self, error: ApiError) -> None:
        """Say what went wrong: as the response, or within a stream that has begun, which then ends."""
        if self.finished:
            return
        if not self.status:
            await self.answer(self.errors.body(error), status=error.status, headers=error.headers)
        else:
            await self.finish(self.errors.event(error))


def event(data: bytes) -> bytes:
    """One server-sent event; `data` holds no line break, as JSON does not."""
    return b"data: " + data + b"\n\n"


def events(values: Iterable[bytes]) -> bytes:
    return b"".join(b"data: " + value + b"\n\n" for value in values)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than {limit} bytes, the most that is taken", headers={"connection": "close"}
    )
