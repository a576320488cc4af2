"""A client of any server that speaks OpenAI's API: one streamed request, with the time of every piece of its answer.

Written on asyncio's streams: a client library costs more per token than the servers that are measured here.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


class ServerError(ValueError):
    """A server that cannot be reached or does not answer as OpenAI's API would; the message says what to do."""


@dataclass(slots=True)
class Answer:
    """What came of one request; times are seconds since `started`."""

    started: float  # time.perf_counter()
    times: list[float] = field(default_factory=list)  # of each piece of text, reasoning included
    ended: float = 0.0
    text: str = ""  # without reasoning
    prompt_tokens: int | None = None
    output_tokens: int | None = None  # as the server counts; None: it does not say
    cached_tokens: int | None = None
    error: str = ""  # "": it is whole
    status: int = 0

    @property
    def tokens(self) -> int:
        """Generated; pieces of text where the server does not count."""
        return len(self.times) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float:
        return self.times[0] if self.times else self.ended

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None of an answer of one."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 and len(self.times) > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Between pieces."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


class Client:
    """Of one server. `url` is what an OpenAI client calls its base URL, with or without /v1."""

    def __init__(
        self, url: str, *, model: str | None = None, key: str | None = None, chat: bool = True, timeout: float = 600.0
    ):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"{url!r} is no address of a server; give one such as http://127.0.0.1:8000")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else f"{path}/v1"
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._model = model
        self._key = key
        self._chat = chat
        self._timeout = timeout
        self.extra: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0}  # of every body

    async def model(self) -> str:
        """The model asked for, or the first that the server names."""
        if self._model is None:
            status, data = await self._whole("GET", "/models", None)
            try:
                self._model = str(json.loads(data)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ServerError(f"the server names no model (status {status}); give --model") from None
        return self._model

    async def ask(self, messages: list[dict[str, str]], max_tokens: int) -> Answer:
        """One streamed request; what goes wrong is in the answer."""
        body: dict[str, Any] = {
            "model": await self.model(), "max_tokens": max_tokens, "stream": True,
            "stream_options": {"include_usage": True}, **self.extra,
        }  # fmt: skip
        if self._chat:
            path, body["messages"] = "/chat/completions", messages
        else:
            path, body["prompt"] = "/completions", "\n".join(message["content"] for message in messages)
        answer = Answer(time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout):
                await self._stream(path, body, answer)
        except TimeoutError:
            answer.error = f"not finished within {self._timeout:g} s"
        except (OSError, EOFError, ValueError, LookupError, AttributeError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.perf_counter() - answer.started
        if not answer.error and not answer.times and not answer.output_tokens:  # a tag or a control token has no text
            answer.error = "no text came"
        return answer

    async def _stream(self, path: str, body: dict[str, Any], answer: Answer) -> None:
        reader, writer = await self._connect()
        try:
            await self._send(writer, "POST", path, json.dumps(body).encode())
            status, headers = await _head(reader)
            answer.status = status
            if status != 200:
                data = b"".join([part async for part in _body(reader, headers)])
                answer.error = f"status {status}: {_message(data)}"
                return
            rest, texts = b"", list[str]()
            async for part in _body(reader, headers):
                now = time.perf_counter() - answer.started
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:") and self._take(line[5:].strip(), answer, texts):
                        answer.times.append(now)
            answer.text = "".join(texts)
        finally:
            writer.close()

    def _take(self, data: bytes, answer: Answer, texts: list[str]) -> bool:
        """Read one event; whether it brought text."""
        if data == b"[DONE]":
            return False
        event = json.loads(data)
        if "error" in event:
            answer.error = _message(data)
            return False
        usage = event.get("usage")
        if usage:
            answer.prompt_tokens, answer.output_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        found = False
        for choice in event.get("choices", ()):
            said = (choice.get("delta") or {}) if self._chat else choice
            text = said.get("content" if self._chat else "text")
            if text:
                texts.append(text)
            found = bool(found or text or said.get("reasoning_content") or said.get("reasoning"))
        return found

    # -- HTTP

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, ssl=self._tls, limit=2**22)

    async def _send(self, writer: asyncio.StreamWriter, method: str, path: str, data: bytes) -> None:
        lines = [
            f"{method} {self._base}{path} HTTP/1.1", f"host: {self.host}:{self.port}", "connection: close",
            "content-type: application/json", f"content-length: {len(data)}",
        ]  # fmt: skip
        if self._key is not None:
            lines.append(f"authorization: Bearer {self._key}")
        writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        await writer.drain()

    async def _whole(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(min(self._timeout, 30.0)):
                reader, writer = await self._connect()
                try:
                    await self._send(writer, method, path, b"" if body is None else json.dumps(body).encode())
                    status, headers = await _head(reader)
                    return status, b"".join([part async for part in _body(reader, headers)])
                finally:
                    writer.close()
        except (OSError, TimeoutError, EOFError, ValueError) as error:
            raise ServerError(
                f"no server answers at {self.host}, port {self.port} ({str(error) or type(error).__name__}); "
                "start one, such as `headrace serve`, or give its --url"
            ) from None


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    words = (await reader.readline()).split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise ValueError("that is no HTTP")
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return int(words[1]), headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while part := await reader.read(2**16):
            yield part


def _message(data: bytes) -> str:
    try:
        error = json.loads(data)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:200]
    except (ValueError, LookupError, TypeError):
        return data[:200].decode("utf-8", "replace")
