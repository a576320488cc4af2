"""Rude clients, dying engines, and the end. S numbers are cases that engines in the field got wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import CHAT, TEXT, Server, alive, fake_command, fixed, serve_command, strict, until

LONG = {"prompt": "xx", "max_tokens": 3000, "ignore_eos": True}


def read_all(connection: socket.socket, seconds: float = 5.0) -> bytes:
    connection.settimeout(seconds)
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
        if b"data: [DONE]" in part:
            break
    return b"".join(parts)


def reset(connection: socket.socket) -> None:
    """Close so that the other side sees a reset, not an end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


# -- errors


def test_no_choices_is_refused_in_a_stream_too(slow):  # S11
    assert slow.text(n=0, stream=True).status == 400


def test_an_error_ends_the_stream(slow):  # S11
    reply = slow.text("Eh", max_tokens=50, stream=True)
    errors = [event for event in reply.events if "error" in event]
    assert reply.events[-1] == errors[0] and "the scripted error" in errors[0]["error"]["message"]
    assert not any(choice["finish_reason"] for event in reply.events[:-1] for choice in event["choices"])
    until(slow.is_idle)


def test_an_error_is_a_500_without_a_stream(slow):
    reply = slow.text("Eh", max_tokens=50)
    assert reply.status == 500 and "the scripted error" in reply.message
    until(slow.is_idle)


# -- clients that go


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_goes_ends_its_request(slow, stream, how):  # S13
    aborted = slow.metric("headrace_requests_total", outcome="aborted")
    with slow.open(TEXT, {**LONG, "stream": stream}) as connection:
        until(lambda: slow.metric("headrace_requests_running") == 1)
        if how == "reset":
            reset(connection)
    until(slow.is_idle, 1)  # the steps take 10 ms
    before = slow.metric("headrace_generated_tokens_total")
    time.sleep(0.1)
    assert slow.metric("headrace_generated_tokens_total") == before
    assert slow.metric("headrace_requests_total", outcome="aborted") == aborted + 1


def test_a_client_that_goes_while_queued(slow):  # S13
    with contextlib.ExitStack() as stack:
        for _ in range(4):  # all rows
            stack.enter_context(slow.open(TEXT, {**LONG, "stream": True}))
        until(lambda: slow.metric("headrace_requests_running") == 4)
        for stream in (False, True):
            with slow.open(TEXT, {**LONG, "stream": stream}):
                until(lambda: slow.metric("headrace_requests_waiting") == 1)
            until(lambda: slow.metric("headrace_requests_waiting") == 0, 1)
    until(slow.is_idle, 1)


def test_a_client_that_goes_during_a_long_prefill(slow):  # S13: 64 tokens a step
    with slow.open(TEXT, {"prompt": "x" * 4000, "max_tokens": 5}):
        until(lambda: slow.metric("headrace_requests_running") == 1)
    until(slow.is_idle, 0.5)


def test_gauges_after_all_streams_are_closed(server):  # S14
    expected = fixed(server)
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
                connection = stack.enter_context(server.open(TEXT, body))
                connection.recv(10)
        until(server.is_idle, 2)
    alive(server, expected)


def test_connections_dropped_by_the_hundred(server):
    expected = fixed(server)
    body = {"prompt": "b", "max_tokens": 100, "ignore_eos": True, "stream": True}

    def rude(number: int) -> None:
        with server.open((TEXT, CHAT)[number % 2], body) as connection:
            if number % 3:
                connection.recv(1 + number % 2000)
            if number % 2:
                reset(connection)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(rude, range(200)))
    until(server.is_idle, 10)
    alive(server, expected)


def test_half_a_request(server):
    expected = fixed(server)
    for data in (b"POST", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{", b"\x16\x03\x01"):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(data)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20_000)
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"\r\n")
            assert b" 4" in connection.recv(100)
    alive(server, expected)


def test_a_slow_reader_does_not_hold_others_up(slow):
    with slow.open(TEXT, {**LONG, "stream": True}):  # of which nothing is read
        until(lambda: slow.metric("headrace_requests_running") == 1)
        assert slow.text("quick", max_tokens=3).status == 200
    until(slow.is_idle)


# -- the engine's death


def test_death_of_the_engine_ends_the_process(tiny_model, tmp_path):
    env = {"FAKE_STEP_SECONDS": "0.01", "TMPDIR": str(tmp_path)}
    with Server(fake_command(tiny_model), env) as server, ThreadPoolExecutor() as pool:
        pid = server.engine_pid
        whole = pool.submit(server.text, "xx", max_tokens=3000, ignore_eos=True)
        stream = pool.submit(server.text, "yy", max_tokens=3000, ignore_eos=True, stream=True)
        until(lambda: server.metric("headrace_requests_running") == 2)
        started = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        reply = whole.result(5)
        assert time.monotonic() - started < 1
        assert reply.status == 500 and "SIGKILL" in reply.message and reply.json["error"]["code"] == "engine_died"
        assert "SIGKILL" in stream.result(5).events[-1]["error"]["message"]
        assert server.process.wait(5) == 1
        assert "SIGKILL" in server.log and not list(tmp_path.iterdir())


def test_a_step_that_raises_is_told_whole(tiny_model):
    with Server(fake_command(tiny_model)) as server:
        reply = server.text("Dx", max_tokens=50, stream=True)
        # on a busy machine it may be dead before a first token was sent: then the stream is refused as a whole
        told = reply.events[-1] if reply.status == 200 else reply.json
        assert "the scripted death" in told["error"]["message"]
        assert server.process.wait(5) == 1
        assert "Traceback" in server.log and "fake_engine.py" in server.log and server.log.count("scripted death") >= 1


def test_an_engine_that_cannot_load(tiny_model):
    env = {"FAKE_FAILS_TO_LOAD": "1"}
    with Server(fake_command(tiny_model, "--on-engine-death", "restart"), env, wait_ready=False) as server:
        assert server.process.wait(10) == 1
        assert "the scripted load failure" in server.log and "Traceback" in server.log


def test_no_memory_to_load_says_what_to_do(tiny_model):
    with Server(fake_command(tiny_model), {"FAKE_FAILS_TO_LOAD": "memory"}, wait_ready=False) as server:
        assert server.process.wait(10) == 2
        told = server.lines[-1]
        assert told.startswith("headrace: error: not enough memory") and "kv_cache" in told, server.log


def test_the_engine_is_restarted(tiny_model):
    options = ("--on-engine-death", "restart", "--served-model-name", "tiny")
    with Server(serve_command(tiny_model, *options)) as server:
        expected, pid = fixed(server), server.engine_pid
        before = server.metric("headrace_engine_steps_total")
        with server.open(TEXT, {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}) as connection:
            connection.recv(100)
            os.kill(pid, signal.SIGKILL)
            data = read_all(connection)
            assert b"SIGKILL" in data and b"[DONE]" in data
        until(lambda: server.get("/ready").status == 200, 20)
        alive(server, expected)
        assert server.engine_pid != pid and server.metric("headrace_engine_restarts_total") == 1
        assert server.metric("headrace_engine_steps_total") >= before and server.is_idle()
        assert server.process.poll() is None


def test_the_engine_goes_with_the_api_process(tiny_model, tmp_path):
    with Server(fake_command(tiny_model), {"TMPDIR": str(tmp_path)}) as server:
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        pid = server.engine_pid
        server.process.kill()
        server.process.wait()

        def gone() -> bool:
            try:
                return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                return True

        until(gone)
        assert not list(tmp_path.iterdir())


def test_health_tells_of_an_engine_that_hangs(tiny_model):
    with Server(fake_command(tiny_model, "--health-timeout", "0.3", "--drain-timeout", "0.2")) as server:
        assert server.get("/health").status == 200
        with server.open(TEXT, {"prompt": "Hx", "max_tokens": 5}):
            until(lambda: server.get("/health").status == 503)
            assert "has not answered" in server.get("/health").message


# -- the end


def test_sigterm_lets_requests_finish(tiny_model):
    options, env = ("--max-num-seqs", "2"), {"FAKE_STEP_SECONDS": "0.01"}
    with Server(fake_command(tiny_model, *options), env) as server, ThreadPoolExecutor() as pool:
        running = [pool.submit(server.text, "xx", max_tokens=60, ignore_eos=True, stream=i > 0) for i in range(3)]
        until(lambda: server.metric("headrace_requests_waiting") == 1)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/ready").status == 503)
        late = server.text("late", max_tokens=1)
        assert late.status == 503 and "shutting down" in late.message
        assert [each.result(10).status for each in running] == [200] * 3
        assert running[1].result().choices()[0][1] == ["length"]
        assert server.process.wait(5) == 0


@pytest.mark.parametrize("again", [False, True])
def test_sigterm_has_a_deadline(tiny_model, again):
    env = {"FAKE_STEP_SECONDS": "0.01"}
    options = ("--drain-timeout", "60" if again else "0.3")
    with Server(fake_command(tiny_model, *options), env) as server, ThreadPoolExecutor() as pool:
        running = pool.submit(server.text, "xx", max_tokens=3000, ignore_eos=True, stream=True)
        until(lambda: server.metric("headrace_requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        if again:
            time.sleep(0.1)
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 0
        assert "the server" in running.result(5).events[-1]["error"]["message"]


def test_neighbours_of_a_dropped_request_are_right(server):
    body = {"max_tokens": 40, "seed": 9, "temperature": 1, "ignore_eos": True}
    expected = [server.text(prompt, **body).json["choices"][0]["text"] for prompt in ("one", "two", "three")]
    stop = threading.Event()

    def drop() -> None:
        while not stop.is_set():
            with server.open(TEXT, {"prompt": "rude", "max_tokens": 300, "stream": True}) as connection:
                connection.recv(1)

    with ThreadPoolExecutor(4) as pool:
        rude = pool.submit(drop)
        found = list(pool.map(lambda prompt: server.text(prompt, **body), ("one", "two", "three")))
        stop.set()
        rude.result(5)
    assert [reply.json["choices"][0]["text"] for reply in found] == expected
    assert strict(found[0].data)
    until(server.is_idle)
