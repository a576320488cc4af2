"""Faults at any size: short in the tests (test_faults_short.py), in full by bench/faults.py.

Each case takes a running server or makes its own, does its worst, asserts that nothing is left over, nothing has grown
and others were answered right, and returns what it counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from harness import CHAT, TEXT, Server, fake_command, fixed, serve_command, until

CLOCK = Path(__file__).parent / "clock"
Found = dict[str, Any]


def memory(pid: int) -> float:
    """MiB resident."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def request(path: str, body: dict[str, Any], close: bool = True) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    return (head + ("connection: close\r\n\r\n" if close else "\r\n")).encode() + data


@contextlib.asynccontextmanager
async def connected(server: Server) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def in_groups(count: int, at_once: int, one: Any) -> None:
    """`one(number)` for each number, so many at a time."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await one(number)

    await asyncio.gather(*(work() for _ in range(min(at_once, count))))


# -- clients that go


def dropped(server: Server, count: int) -> Found:
    """`count` streams dropped in the middle, by ends and resets, while well-behaved clients are answered right."""
    expected, pid = fixed(server), server.process.pid
    before = descriptors(pid)
    checked = Counter[str]()
    body = {"prompt": "b", "max_tokens": 200, "ignore_eos": True, "stream": True}
    chat = {"messages": [{"role": "user", "content": "b"}], "max_tokens": 200, "ignore_eos": True, "stream": True}
    draw = random.Random(count)

    async def rude(number: int) -> None:
        async with connected(server) as (reader, writer):
            writer.write(request(CHAT, chat) if number % 2 else request(TEXT, body))
            with contextlib.suppress(ConnectionError):
                if number % 5:  # or it goes before anything came
                    await reader.read(draw.choice((1, 100, 1000, 10_000)))
            if number % 3 == 0:
                option = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)

    async def both() -> None:
        stop = asyncio.Event()

        async def polite() -> None:
            while not stop.is_set():
                answer = await asyncio.to_thread(fixed, server)
                assert answer == expected, "a neighbour of dropped requests got another answer"
                checked["right"] += 1

        watch = asyncio.create_task(polite())
        await in_groups(count, 32, rude)
        stop.set()
        await watch

    asyncio.run(both())
    until(server.is_idle, 20)
    until(lambda: descriptors(pid) <= before + 4, 20)
    assert fixed(server) == expected and server.get("/health").status == 200
    return {"dropped": count, "answers checked meanwhile": checked["right"]}


# -- clients that are slow


def slow_loris(server: Server, count: int, seconds: float) -> Found:
    """`count` connections that send a byte now and then: of a head, of a second head, of a body. `server` must have a
    body_timeout below `seconds`, and then all of them are closed, while others are answered at once."""
    expected, pid = fixed(server), server.process.pid
    before = descriptors(pid)
    waits: list[float] = []
    closed = Counter[str]()
    whole = request(TEXT, {"prompt": "a", "max_tokens": 1}, close=False)

    async def slow(number: int) -> None:
        kind = ("head", "second head", "body")[number % 3]
        async with connected(server) as (reader, writer):
            if kind == "second head":
                writer.write(whole)
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            start = (
                b"" if kind != "body" else b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10000\r\n\r\n{"
            )
            writer.write(start)
            ended = asyncio.create_task(reader.read())
            began = time.monotonic()
            for byte in b"POST /v1/completions HTTP/1.1\r\nx-slow: " + b"a" * 10_000:
                with contextlib.suppress(ConnectionError):
                    writer.write(bytes([byte]))
                    await writer.drain()
                done, _ = await asyncio.wait({ended}, timeout=0.1 * seconds)
                if done:
                    break
                assert time.monotonic() - began < 2 * seconds + 5, f"a slow {kind} is never cut off"
            with contextlib.suppress(ConnectionError):
                await ended
            closed[kind] += 1

    async def both() -> None:
        task = asyncio.gather(*(slow(number) for number in range(count)))
        while not task.done():
            started = time.monotonic()
            assert await asyncio.to_thread(fixed, server) == expected
            waits.append(time.monotonic() - started)
            await asyncio.sleep(0.05)
        await task

    asyncio.run(both())
    until(lambda: descriptors(pid) <= before + 4, 20)
    assert server.is_idle() and max(waits) < 5
    return {"slow connections": count, "closed": dict(closed), "longest wait of others, s": round(max(waits), 3)}


# -- the engine's death


def engine_killed(model: Path, rounds: int, clients: int) -> Found:
    """kill -9 of the engine under load, again and again (at most 5 times, then the server gives up by design)."""
    options = ("--on-engine-death", "restart", "--served-model-name", "tiny", "--max-num-seqs", "8")
    outcomes = Counter[str]()
    with Server(serve_command(model, *options)) as server:
        expected, pid = fixed(server), server.process.pid
        before, grown = descriptors(pid), memory(pid)
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
        times = []

        async def one(stop: asyncio.Event, number: int) -> None:
            while not stop.is_set():
                async with connected(server) as (reader, writer):
                    writer.write(request(TEXT, {**body, "stream": bool(number % 2)}))
                    data = await asyncio.wait_for(reader.read(), 30)
                if b"HTTP/1.1 200" in data and (b"[DONE]" in data or b'"usage"' in data) and b'"error"' not in data:
                    outcomes["whole"] += 1
                elif b"the engine died" in data and b"SIGKILL" in data:
                    outcomes["told that the engine died"] += 1
                elif b"HTTP/1.1 503" in data and b"the engine is not ready" in data:
                    outcomes["told that it is not ready"] += 1
                    await asyncio.sleep(0.05)
                else:
                    raise AssertionError(f"an answer that says nothing: {data[-500:]!r}")

        async def kill() -> None:
            for _ in range(rounds):
                stop = asyncio.Event()
                load = asyncio.gather(*(one(stop, number) for number in range(clients)))
                await asyncio.sleep(0.7)
                engine = await asyncio.to_thread(lambda: server.engine_pid)
                told = outcomes["told that the engine died"]
                os.kill(engine, signal.SIGKILL)
                began = time.monotonic()
                while outcomes["told that the engine died"] == told:
                    assert time.monotonic() - began < 5, "nobody was told"
                    await asyncio.sleep(0.005)
                times.append(time.monotonic() - began)
                await asyncio.to_thread(until, lambda: server.get("/ready").status == 200, 20)
                await asyncio.sleep(0.3)
                stop.set()
                await load

        asyncio.run(kill())
        until(server.is_idle, 20)
        assert fixed(server) == expected and server.metric("headrace_engine_restarts_total") == rounds
        assert max(times) < 1.0 and descriptors(pid) <= before + 4
        return {
            "kills": rounds, **outcomes, "longest until somebody was told, s": round(max(times), 3),
            "memory grown, MiB": round(memory(pid) - grown, 1),
        }  # fmt: skip


# -- a full disk


def full_disk(model: Path, folder: Path, requests: int, limit: int = 40_000) -> Found:
    """The log and the ledger may grow to `limit` bytes and no further; the server goes on without them."""
    log, ledger = folder / "log", folder / "ledger.jsonl"
    port = _free_port()
    command = serve_command(model, "--served-model-name", "tiny", "--ledger-jsonl", str(ledger))
    command[command.index("--port") + 1] = str(port)

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    env = {**os.environ, "HEADRACE_NATIVE": "0", "HEADRACE_CHECK": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env=env, preexec_fn=bounded)
    server = Server(command, port=port)
    server.process = process
    try:
        until(lambda: process.poll() is not None or _answers(server), 30)
        expected = fixed(server)
        for _ in range(requests):
            assert server.text("fill", max_tokens=3).status == 200
        full = [path.name for path in (log, ledger) if path.stat().st_size >= limit - 2000]
        assert full == ["log", "ledger.jsonl"], {path.name: path.stat().st_size for path in (log, ledger)}
        assert fixed(server) == expected and server.get("/health").status == 200 and server.is_idle()
        assert server.get("/ledger?last=5").data.count(b"\n") == 5
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
    return {"requests": requests, "bytes allowed": limit, "full": full}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _answers(server: Server) -> bool:
    with contextlib.suppress(OSError):
        return server.get("/ready").status == 200
    return False


# -- clocks


def clock_steps(model: Path, requests: int) -> Found:
    """The wall clock jumps by up to a day at every look, in both processes; no duration may depend on it."""
    env = {"EXTRA_PYTHONPATH": str(CLOCK)}
    options = ("--served-model-name", "tiny", "--request-timeout", "20")
    with Server(serve_command(model, *options), env) as server:
        assert abs(server.text(max_tokens=1).json["created"] - time.time()) > 1, "the clock does not step"
        expected = fixed(server)
        longest = 0.0
        for number in range(requests):
            started = time.monotonic()
            reply = server.text("a", max_tokens=10, ignore_eos=True, n=1 + number % 3, temperature=1, timeout=15)
            assert reply.status == 200, reply.data
            took = time.monotonic() - started
            bill = server.get(f"/requests/{reply.json['id']}/bill").json
            items = sum(bill[name] for name in
                        ("queued", "prefill", "decode", "waiting", "held_back", "preempted", "between"))  # fmt: skip
            assert 0 < bill["wall"] / 1e9 < took + 0.5 and items == bill["wall"], bill
            longest = max(longest, bill["wall"] / 1e9)
        for line in server.get("/ledger?last=500").data.splitlines():
            record = json.loads(line)
            assert 0 < record["total"] < 60 and record["predicted"] < 60
        for name in ("queue", "time_to_first_token", "inter_token", "request"):
            assert 0 <= server.metric(f"headrace_{name}_seconds_sum") < 60 * (requests + 3), name
        assert fixed(server) == expected and server.is_idle()
        return {"requests": requests, "longest bill, s": round(longest, 3)}


# -- many


def short_requests(model: Path, count: int, at_once: int = 32, real: bool = False, settled_after: int = 0) -> Found:
    """`count` short requests against an engine that answers at once, or the real one: streams, whole answers, refused
    ones, dropped ones. After `settled_after` of them (0: a fifth) memory has what it needs, and then it stays."""
    settled_after = settled_after or count // 5
    options = ("--max-num-seqs", "64", "--served-model-name", "tiny", "--no-log-requests")
    command = serve_command if real else fake_command
    with Server(command(model, *options), {"HEADRACE_CHECK": "0"}) as server:
        pid, engine = server.process.pid, server.engine_pid
        bodies = [
            request(TEXT, {"prompt": "hi", "max_tokens": 2, "ignore_eos": True}, close=False),
            request(TEXT, {"prompt": "hi", "max_tokens": 3, "ignore_eos": True, "stream": True}, close=False),
            request(TEXT, {"prompt": "hi", "max_tokens": 1, "n": 2, "user": "somebody", "odd": 1}, close=False),
            request(CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}, close=False),
            request(TEXT, {"prompt": "hi", "temperature": -1}, close=False),
        ]
        statuses = Counter[int]()
        curve: list[tuple[int, float, float]] = []
        done = 0

        async def client(numbers: Iterator[int]) -> None:
            nonlocal done
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**20)
            for number in numbers:
                if number % 97 == 0:  # one that goes before its answer
                    async with connected(server) as (_, rude):
                        rude.write(bodies[1])
                writer.write(bodies[number % len(bodies)])
                statuses[await _read_answer(reader)] += 1
                done += 1
                if done % max(1, count // 20) == 0:
                    curve.append((done, round(memory(pid), 2), round(memory(engine), 2)))
            writer.close()

        async def all_clients() -> None:
            numbers = iter(range(count))
            await asyncio.gather(*(client(numbers) for _ in range(at_once)))

        started = time.monotonic()
        asyncio.run(all_clients())
        seconds = time.monotonic() - started
        until(server.is_idle, 20)
        assert set(statuses) == {200, 400} and sum(statuses.values()) == count
        settled = next(point for point in curve if point[0] >= settled_after)
        grown = [memory(pid) - settled[1], memory(engine) - settled[2]]
        assert max(grown) < 6, curve
        return {
            "requests": count, "a second": round(count / seconds, 1),
            "statuses": {str(status): number for status, number in statuses.items()},
            f"memory grown after {settled_after}, MiB": {"api": round(grown[0], 2), "engine": round(grown[1], 2)},
            "memory": [{"requests": n, "api MiB": a, "engine MiB": e} for n, a, e in curve],
        }  # fmt: skip


async def _read_answer(reader: asyncio.StreamReader) -> int:
    """The status of one answer, read to its end."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status = int(head.split(" ", 2)[1])
    if "transfer-encoding: chunked" in head:
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
        await reader.readexactly(2)
    else:
        length = next(line for line in head.split("\r\n") if line.startswith("content-length:"))
        await reader.readexactly(int(length.partition(":")[2]))
    return status
