"""HTTP as odd clients speak it, and what is no HTTP at all."""

from __future__ import annotations

import contextlib
import json
import socket
import struct

import pytest
from harness import CHAT, TEXT, Server, alive, fixed, strict

GET = b"GET /version HTTP/1.1\r\nhost: x\r\n"
POST = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
BODY = json.dumps({"prompt": "The quick brown fox", "temperature": 0, "max_tokens": 8, "logprobs": 0}).encode()
LENGTH = b"content-length: %d\r\n" % len(BODY)
CLOSE = b"connection: close\r\n"


@pytest.fixture(scope="module")
def expected(server) -> bytes:
    return fixed(server)


def sent(server: Server, *parts: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
        found = b""
        while data := connection.recv(1 << 16):
            found += data
        return found


def answers(data: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each answer, of those that say their length."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
        found.append((int(head.split(b" ")[1]), data[:length]))
        data = data[length:]
    return found


def text(body: bytes) -> str:
    return strict(body)["choices"][0]["text"]


def chunked(size: int) -> bytes:
    parts = [BODY[at : at + size] for at in range(0, len(BODY), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def test_every_way_to_send_a_request(server, expected):
    """HTTP/1.0, bodies in chunks of a byte, 100-continue, an upgrade that is not taken, several requests at once."""
    right = json.loads(expected)[0]
    old = POST.replace(b"1.1", b"1.0") + LENGTH + b"\r\n" + BODY
    upgrade = POST + LENGTH + b"upgrade: h2c\r\nconnection: upgrade, close\r\n\r\n" + BODY
    for request in (old, upgrade, POST + CLOSE + b"transfer-encoding: chunked\r\n\r\n" + chunked(1)):
        ((status, body),) = answers(sent(server, request))
        assert status == 200 and text(body) == right
    waiting = sent(server, POST + LENGTH + CLOSE + b"expect: 100-continue\r\n\r\n", BODY)
    interim, _, rest = waiting.partition(b"\r\n\r\n")
    assert interim.startswith(b"HTTP/1.1 100") and text(answers(rest)[0][1]) == right
    whole = POST + LENGTH + b"\r\n" + BODY
    found = answers(sent(server, whole * 3 + GET + b"\r\n" + whole.replace(b"host: x\r\n", b"host: x\r\n" + CLOSE)))
    assert [status for status, _ in found] == [200] * 5
    assert [text(found[index][1]) for index in (0, 1, 2, 4)] == [right] * 4 and b"version" in found[3][1]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) + b"\r\n\r\n",  # TLS
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        POST + b"content-length: -1\r\n\r\n",
        POST + b"content-length: \xc2\xb2\r\n\r\n",
        POST + LENGTH + b"content-length: 1\r\n\r\n" + BODY,
        POST + b"transfer-encoding: gzip\r\n\r\n" + BODY,
        POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        POST + LENGTH + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n" + GET + b"\r\n",  # two requests, or one?
        GET + b" folded: x\r\n\x00: y\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused_and_the_connection_closed(server, expected, data):
    ((status, body),) = answers(sent(server, data))
    assert status == 400 and strict(body)["error"]["type"] == "invalid_request_error"
    alive(server, expected)


def test_a_head_without_end_is_cut_off(server, expected):
    with contextlib.suppress(ConnectionError):  # closed before all of it was sent
        assert sent(server, GET, *[b"x: " + b"a" * 10_000 + b"\r\n"] * 1000).startswith(b"HTTP/1.1 400")
    alive(server, expected)


def test_a_body_that_is_too_large_is_not_waited_for(server):
    for more in (b"", b"expect: 100-continue\r\n"):
        ((status, body),) = answers(sent(server, POST + b"content-length: 999999999999\r\n" + more + b"\r\n"))
        assert status == 413 and "bytes" in strict(body)["error"]["message"]


def test_garbage_behind_a_stream_does_not_touch_it(server):
    stream = json.dumps({"messages": [{"role": "user", "content": "a"}], "stream": True, "max_tokens": 4}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(stream)}\r\n\r\n".encode()
    found = sent(server, head + stream + b"\x00\x01garbage\r\n\r\n")
    first, _, rest = found.partition(b"data: [DONE]\n\n")
    assert first.startswith(b"HTTP/1.1 200") and b"no valid HTTP" in rest


def test_reset_in_the_middle_of_a_head(server, expected):
    for part in (b"", b"P", POST, POST + LENGTH + b"\r\n" + BODY[:5]):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(part)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    alive(server, expected)


@pytest.mark.parametrize(
    "path", ["/web/../index.html", "/web/%2e%2e/app.py", "/web/%00", "//web", "/v1/models/%0d%0aa:b"]
)
def test_paths_reach_no_file_and_no_header(server, path):
    found = sent(server, f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    ((status, body),) = answers(found)
    assert status == 404 and strict(body)["error"] and b"\r\na:b" not in found
