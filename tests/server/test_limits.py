"""Who is let in: keys, origins, sizes, the queue, deadlines."""

from __future__ import annotations

import contextlib
import http.client
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import JSON, TEXT, Server, fake_command, serve_command, until

from headrace.config import ConfigError
from headrace.server.options import ServerArgs


@pytest.fixture(scope="module")
def guarded(tiny_model, tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# the keys\nfrom-file\n\n")
    options = ("--api-key-file", str(file), "--cors-origin", "https://a.example", "--max-body", "20000")
    with Server(serve_command(tiny_model, *options), {"HEADRACE_API_KEYS": "one, two"}) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {**JSON, "authorization": f"Bearer {key}"}


def test_keys(guarded):
    for key in ("one", "two", "from-file"):
        assert guarded.ask("GET", "/v1/models", headers=bearer(key)).status == 200
    for headers in ({}, bearer("three"), bearer(""), bearer("on"), {"authorization": "Basic one"}, bearer("\xff")):
        for method, path in (("GET", "/v1/models"), ("POST", TEXT), ("GET", "/ledger"), ("GET", "/requests/x/bill")):
            reply = guarded.ask(method, path, headers=headers)
            assert reply.status == 401 and reply.json["error"]["code"] == "invalid_api_key", (headers, path)
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert guarded.get(path).status == 200


def test_prefixes_are_shared_within_a_key_and_a_salt_only(guarded):
    def cached(key: str, salt: str | None) -> int:
        body = {"prompt": "a long prompt that fills several blocks of sixteen tokens", "max_tokens": 1}
        reply = guarded.ask("POST", TEXT, {**body, "cache_salt": salt}, bearer(key))
        return reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("one", None), cached("two", None), cached("one", "s"), cached("one", "t")] == [0, 0, 0, 0]
    assert cached("one", None) > 0 and cached("one", "") > 0 and cached("two", None) > 0 and cached("one", "s") > 0


def test_bills_are_for_who_sent_the_request(guarded):
    reply = guarded.ask("POST", TEXT, {"prompt": ["a", "b"], "max_tokens": 2, "n": 2}, bearer("one"))
    path = f"/requests/{reply.json['id']}.1/bill"
    assert guarded.ask("GET", path, headers=bearer("one")).json["output_tokens"] == 4
    assert guarded.ask("GET", path, headers=bearer("two")).status == 404


def test_the_ledger_names_no_requests_of_other_keys(guarded):
    reply = guarded.ask("POST", TEXT, {"prompt": "abc" * 30, "max_tokens": 2}, bearer("one"))
    for accept in ("*/*", "text/event-stream"):
        named = {key: first_records(guarded, {**bearer(key), "accept": accept}) for key in ("one", "two")}
        assert reply.json["id"] in named["one"] and '"step_id"' in named["two"]
        assert reply.json["id"] not in named["two"]
    assert guarded.get("/ledger").status == 401


def first_records(server: Server, headers: dict[str, str]) -> str:
    """What /ledger tells until there is nothing new."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", "/ledger?last=1000", headers=headers)
    response, text = connection.getresponse(), ""
    while "nothing new" not in text and (data := response.read1(1 << 20)):
        text += data.decode()
    connection.close()
    return text


def test_origins(guarded):
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    reply = guarded.ask("OPTIONS", TEXT, headers={**ask, "access-control-request-headers": "authorization"})
    assert reply.status == 204 and reply.headers["access-control-allow-origin"] == "https://a.example"
    assert reply.headers["access-control-allow-headers"] == "authorization"
    assert "access-control-allow-origin" in guarded.ask("GET", "/health", headers=ask).headers
    other = guarded.ask("OPTIONS", TEXT, headers={**ask, "origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


def test_bodies_that_are_too_large(guarded):
    reply = guarded.ask("POST", TEXT, b'"' + b"x" * 30_000 + b'"', bearer("one"))
    assert reply.status == 413 and "20000" in reply.message


def test_request_ids(guarded):
    headers = bearer("one")
    own = guarded.ask("POST", TEXT, {"prompt": "a", "max_tokens": 1}, headers)
    assert own.headers["x-request-id"] == own.json["id"]
    given = guarded.ask("GET", "/health", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    odd = guarded.ask("GET", "/health", headers={"x-request-id": "a b<script>"})
    assert odd.headers["x-request-id"] != "a b<script>"


def test_no_text_in_the_log(guarded):
    guarded.ask("POST", TEXT, {"prompt": "secret words", "max_tokens": 2}, bearer("one"))
    guarded.ask("POST", TEXT, {"prompt": "secret words", "temperature": "secret"}, bearer("one"))
    time.sleep(0.1)
    assert "completions 200" in guarded.log and "secret" not in guarded.log and "one" not in guarded.log.split()


def test_a_full_queue(tiny_model):
    options, env = ("--max-num-seqs", "2", "--max-queue", "1"), {"FAKE_STEP_SECONDS": "0.01"}
    body = {"prompt": "xx", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with Server(fake_command(tiny_model, *options), env) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(server.open(TEXT, body))
            until(lambda: server.metric("headrace_requests_waiting") == 1)
            reply = server.text("more", max_tokens=1)
            assert reply.status == 429 and 1 <= int(reply.headers["retry-after"]) <= 60
            assert reply.json["error"]["queue"] == {"alive": 3, "running": 2, "waiting": 1, "limit": 3}
            assert server.get("/ready").status == 503 and server.get("/health").status == 200
        until(server.is_idle)
        assert server.text("more", max_tokens=1).status == 200
        assert server.text(n=4, max_tokens=1).status == 400  # it would never fit


def test_deadlines(tiny_model):
    env = {"FAKE_STEP_SECONDS": "0.01"}
    with Server(fake_command(tiny_model, "--request-timeout", "0.6"), env) as server, ThreadPoolExecutor() as pool:
        whole = pool.submit(server.text, "xx", max_tokens=3000, ignore_eos=True)
        stream = pool.submit(server.text, "xx", max_tokens=3000, ignore_eos=True, stream=True)
        short = server.text("xx", max_tokens=3000, ignore_eos=True, timeout=0.2)
        assert short.status == 504 and "0.2 s" in short.message
        assert whole.result(5).status == 504
        assert stream.result(5).events[-1]["error"]["type"] == "timeout_error"
        until(server.is_idle)
        assert server.metric("headrace_requests_total", outcome="timeout") == 3


def test_a_head_that_never_comes(tiny_model):
    import socket

    with (
        Server(fake_command(tiny_model, "--body-timeout", "0.3")) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=5) as silent,
        socket.create_connection(("127.0.0.1", server.port), timeout=5) as slow,
    ):
        silent.sendall(b"POST /v1/completions HTT")
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert silent.recv(100) == b""
        assert b"408" in slow.recv(100)


@pytest.mark.parametrize(
    "options",
    [
        {"port": 70_000},
        {"host": ""},
        {"max_queue": -1},
        {"drain_timeout": 0},
        {"api_key_file": "/nonexistent/keys"},
        {"chat_template": "/nonexistent/template"},
    ],
)
def test_options_that_cannot_be(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        args = ServerArgs(**options)
        args.api_keys()
        args.template_source()
