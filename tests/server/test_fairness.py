"""Nobody takes what is others': classes of work, limits for each key, objectives, readers that do not read."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest
from harness import JSON, TEXT, Server, fake_command, serve_command, until

from headrace.config import ConfigError
from headrace.server.admission import CallerLimit, check_first_token
from headrace.server.errors import ApiError
from headrace.server.options import ServerArgs

LONG = {"prompt": "xx", "max_tokens": 3000, "ignore_eos": True, "stream": True}


def test_batch_work_gives_way(slow):
    with contextlib.ExitStack() as stack:
        for _ in range(4):  # all rows
            stack.enter_context(slow.open(TEXT, {**LONG, "service_tier": "flex"}))
        until(lambda: slow.metric("headrace_requests_running") == 4)
        started = time.monotonic()
        assert slow.text("quick", max_tokens=3).status == 200
        assert time.monotonic() - started < 5  # the others take half a minute
        late = slow.text("batch too", max_tokens=3, service_tier="flex", timeout=0.3)
        assert late.status == 504  # equals never swap
    until(slow.is_idle, 2)


def test_service_tiers(server):
    for tier in ("auto", "default", "flex", "priority"):
        reply = server.text(max_tokens=1, service_tier=tier)
        assert reply.status == 200 and "x-headrace-ignored" not in reply.headers
    wrong = server.text(max_tokens=1, service_tier=3)
    assert wrong.status == 400 and wrong.json["error"]["param"] == "service_tier"


def test_each_key_has_its_limit(tiny_model):
    env = {"FAKE_STEP_SECONDS": "0.01", "HEADRACE_API_KEYS": "one,two"}
    with Server(fake_command(tiny_model, "--max-per-key", "2"), env) as server:

        def ask(key: str, **fields: object) -> int:
            headers = {**JSON, "authorization": f"Bearer {key}"}
            body = {"prompt": "quick", "max_tokens": 2, **fields}
            reply = server.ask("POST", TEXT, body, headers)
            if reply.status == 429:
                assert reply.json["error"]["code"] == "key_limit" and reply.headers["retry-after"] == "1"
            return reply.status

        assert ask("one", n=3) == 429 and ask("one", n=2) == 200
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer one\r\ncontent-length: "
        body = b'{"prompt": "xx", "max_tokens": 3000, "ignore_eos": true, "stream": true}'
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                connection.sendall(head.encode() + str(len(body)).encode() + b"\r\n\r\n" + body)
            until(lambda: server.metric("headrace_requests_running") == 2)
            assert ask("one") == 429 and ask("two") == 200
        until(lambda: server.metric("headrace_requests_running") == 0)
        assert ask("one") == 200 and ask("one", max_tokens="x") == 400 and ask("one", n=2) == 200


def test_limits_are_given_back():
    limit = CallerLimit(2)
    limit.take(None, 50)
    limit.take("a", 2)
    with pytest.raises(ApiError, match="2 choices"):
        limit.take("a", 1)
    limit.take("b", 2)
    limit.give("a", 1)
    limit.take("a", 1)
    for name in ("a", "b"):
        limit.give(name, 2)
    assert not limit._alive
    CallerLimit(0).take("a", 1000)


def test_first_tokens_that_would_be_late(tiny_model):
    check_first_token(9.0, None, False)
    check_first_token(0.5, 1.0, False)
    check_first_token(9.0, 1.0, True)
    env = {"FAKE_STEP_SECONDS": "0.01", "FAKE_BACKLOG": "3.5"}
    with Server(fake_command(tiny_model, "--ttft-slo", "500"), env) as server:
        assert server.text("xx", max_tokens=2).status == 200  # nothing was predicted yet
        late = server.text("xx", max_tokens=2)
        assert late.status == 429 and late.json["error"]["code"] == "first_token_late"
        assert late.headers["retry-after"] == "3" and "3.5 s" in late.message
        assert server.text("xx", max_tokens=2, service_tier="flex").status == 200


@pytest.mark.parametrize("tokens", [True, False])
def test_who_does_not_read_is_cut_off(tiny_model, tokens):
    """Of a stream, and of one large answer; what the kernel holds for such a client is bounded too."""
    options = ("--served-model-name", "tiny", "--write-timeout", "0.5", "--max-body", str(2**23))
    with Server(serve_command(tiny_model, *options)) as server:
        path, body = TEXT, {"prompt": "a", "max_tokens": 500, "n": 8, "logprobs": 20, "stream": True, "temperature": 1}
        body["ignore_eos"] = True  # a random model would end at any moment
        if tokens:
            path, body = "/tokenize", {"prompt": "a" * 1_500_000, "return_token_strs": True}
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            from json import dumps

            data = dumps(body).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode() + data)
            connection.settimeout(15)
            assert connection.recv(20).startswith(b"HTTP/1.1 200")
            time.sleep(1.5)
            size = 0
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(1 << 16):
                    size += len(part)
            assert size < 1_000_000  # of several
        until(server.is_idle)
        assert server.text(max_tokens=2, ignore_eos=True).status == 200
        if not tokens:  # the engine may have been at the end of it before the client was cut off
            ended = [server.metric("headrace_requests_total", outcome=each) for each in ("aborted", "length")]
            assert ended in ([1, 1], [0, 2])


def test_slow_readers_that_read_get_everything(tiny_model):
    options = ("--served-model-name", "tiny", "--write-timeout", "1", "--max-num-seqs", "8")
    with Server(serve_command(tiny_model, *options)) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        data = b'{"prompt": "a", "max_tokens": 300, "n": 2, "logprobs": 20, "stream": true, "temperature": 1}'
        head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        found = b""
        while part := connection.recv(1 << 14):
            found += part
            time.sleep(0.005)
        assert b"data: [DONE]" in found[-100:]


@pytest.mark.parametrize("options", [{"max_per_key": -1}, {"write_timeout": 0}])
def test_options_that_cannot_be(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerArgs(**options)
