"""A server in a process of its own, and ways to talk to it: well-behaved, strict and rude."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
JSON = {"content-type": "application/json"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def strict(data: bytes | str) -> Any:
    """JSON, without the numbers that JSON does not have."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(data, parse_constant=refuse)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return strict(self.data)

    @property
    def message(self) -> str:
        """Of an error."""
        return self.json["error"]["message"]

    @property
    def events(self) -> list[Any]:
        """Of a stream that ended as it should."""
        parts = self.data.decode().split("\n\n")
        assert parts[-1] == "" and parts[-2] == "data: [DONE]", parts[-3:]
        return [strict(part.removeprefix("data: ")) for part in parts[:-2]]

    @property
    def named(self) -> list[Any]:
        """Events of a stream that have names."""
        parts = self.data.decode().split("\n\n")
        assert parts[-1] == ""
        found = []
        for part in parts[:-1]:
            name, data = part.split("\n")
            found.append(strict(data.removeprefix("data: ")))
            assert name == "event: " + found[-1]["type"]
        return found

    def choices(self) -> dict[int, tuple[str, list[str]]]:
        """Of a stream: text and finish reasons of each choice."""
        found: dict[int, tuple[str, list[str]]] = {}
        for each in self.events:
            for choice in each["choices"]:
                text, reasons = found.get(choice["index"], ("", []))
                assert not reasons, "text after the end of a choice"
                piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                reason = choice["finish_reason"]
                found[choice["index"]] = text + piece, reasons + ([reason] if reason else [])
        return found


@dataclass
class Server:
    """`command` must say "listening at http://HOST:PORT" and then "ready" on stderr."""

    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    wait_ready: bool = True
    lines: list[str] = field(default_factory=list)
    port: int = 0

    def __enter__(self) -> Server:
        path = os.pathsep.join(map(str, (TESTS.parent / "src", TESTS, TESTS / "server")))
        if extra := self.env.get("EXTRA_PYTHONPATH"):
            path = extra + os.pathsep + path
        env = {
            **os.environ, "PYTHONPATH": path, "HEADRACE_NATIVE": "0",
            "HEADRACE_CHECK": "1", **self.env,
        }  # fmt: skip
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, env=env, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        wanted = "INFO ready" if self.wait_ready else "listening at"
        until(lambda: any(wanted in line for line in self.lines) or self.process.poll() is not None, 30)
        match = re.search(r"listening at http://[^:]+:(\d+)", self.log)
        assert match and self.process.poll() is None, self.log
        self.port = int(match[1])
        return self

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(5)
            self.process.kill()
        self._reader.join(2)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 20
    ) -> Reply:
        """`body`: bytes as they are, anything else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, data, JSON if headers is None else headers)
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any = None, /, **fields: Any) -> Reply:
        return self.ask("POST", path, {**(body or {}), **fields})

    def chat(self, text: str = "hi", /, **fields: Any) -> Reply:
        return self.post(CHAT, messages=[{"role": "user", "content": text}], **fields)

    def text(self, prompt: Any = "hi", /, **fields: Any) -> Reply:
        return self.post(TEXT, prompt=prompt, **fields)

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, headers=headers)

    @contextlib.contextmanager
    def open(self, path: str, body: Any) -> Iterator[socket.socket]:
        """A request whose answer is the caller's to read, or not."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(head.encode() + data)
            yield connection

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that have these labels."""
        total = 0.0
        for line in self.get("/metrics").data.decode().splitlines():
            match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if match and match[1] == name and all(f'{k}="{v}"' in (match[2] or "") for k, v in labels.items()):
                total += float(match[3])
        return total

    @property
    def engine_pid(self) -> int:
        return int(self.get("/health").json["engine_pid"])

    def is_idle(self) -> bool:
        names = ("requests_running", "requests_waiting", "kv_blocks_held")
        return all(self.metric(f"headrace_{name}") == 0 for name in names)


def serve_command(model: Path | str, *options: str) -> list[str]:
    return [sys.executable, "-m", "headrace", "serve", "-m", str(model), "--port", "0", *options]


def fake_command(model: Path | str, *options: str) -> list[str]:
    """A server on fake_engine.py; options as those of `headrace serve`."""
    return [sys.executable, str(Path(__file__).parent / "fake_engine.py"), "-m", str(model), "--port", "0", *options]


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for a condition; AssertionError if it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def alive(server: Server, expected: bytes) -> None:
    """/health is well and a fixed request has the answer that it had before."""
    assert server.get("/health").status == 200
    assert fixed(server) == expected


def fixed(server: Server) -> bytes:
    """The answer to a greedy request, but for what names it."""
    reply = server.text("The quick brown fox", temperature=0, max_tokens=8, logprobs=0)
    assert reply.status == 200, reply.data
    choice = reply.json["choices"][0]
    return json.dumps([choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"]]).encode()
