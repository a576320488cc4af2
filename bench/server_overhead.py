"""What the API process costs: tokens streamed and short requests per second of its own processor time, and the time it
adds to a first token, with an engine that answers at once.

    .venv/bin/python bench/server_overhead.py [--json bench/results/cpu/server_overhead.json]

The engine is a process of its own, as always, and runs no model: a new request has its first token at once, later ones
come at a fixed pace, so that each is an event of its own. The clients are a third process; they count bytes. Rates are
per second of the API process's CPU time, which neighbours on the machine do not change; latencies are wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headrace.bench.results import Row, write_results
from headrace.config import EngineArgs
from headrace.core.request import FinishReason, Request, TokenOutput
from headrace.frontend.ipc import Add, EngineInfo
from headrace.ledger.book import NullLedger

HERE = Path(__file__)
PACE = 0.05  # seconds between the tokens of a request
TOKENS_A_SECOND, REQUESTS_A_SECOND, TTFT, TTFT_P99 = 4000.0, 300.0, 3.0, 50.0  # targets; milliseconds


class InstantCore:
    """Has the methods of EngineCore that the loop calls."""

    def __init__(self) -> None:
        self._new: list[Request] = []
        self._running: dict[str, Request] = {}
        self._due = 0.0
        pool = SimpleNamespace(num_held=0, num_blocks=1)
        self.scheduler = SimpleNamespace(
            running=self._running, waiting=(), kv=SimpleNamespace(pool=pool), backlog=lambda: 0.0
        )

    def add(self, request: Request) -> None:
        self._new.append(request)

    def abort(self, ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[TokenOutput]:
        return [TokenOutput(each, [], reason) for each in ids if self._running.pop(each, None)]

    @property
    def has_work(self) -> bool:
        return bool(self._new or self._running)

    def step(self) -> list[TokenOutput]:
        left = self._due - time.monotonic()
        if left > 0 and not self._new:
            time.sleep(min(left, 0.0005))
            return []
        stepping, self._new = self._new, []
        self._running.update((request.id, request) for request in stepping)
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + PACE
            stepping = list(self._running.values())
        outputs = []
        for request in stepping:
            request.token_ids.append(64 + request.num_output % 26)
            reason = FinishReason.LENGTH if request.num_output >= request.max_new_tokens else None
            if reason is not None:
                del self._running[request.id]
            outputs.append(TokenOutput(request.id, request.token_ids[-1:], reason))
        return outputs


class InstantEngine:
    def __init__(self) -> None:
        self.core: Any = InstantCore()
        self.ledger = NullLedger()

    def prepare(self, add: Add) -> None:
        return None

    def requests(self, add: Add) -> list[Request]:
        return [Request(add.id, add.token_ids, add.params, max_new_tokens=add.params.max_tokens or 16)]

    def bill(self, request_id: str) -> None:
        return None

    def info(self) -> EngineInfo:
        return EngineInfo(4096, 4095, 512, 1, 16, 0.0, [])

    def close(self) -> None:
        pass


def make(args: EngineArgs) -> InstantEngine:
    return InstantEngine()


def serve(model: str) -> int:
    from headrace.server.options import ServerArgs
    from headrace.server.run import serve as run
    from headrace.server.service import Service

    args = ServerArgs(port=0, log_requests=False, served_model_name=("bench",))
    return run(Service(args, EngineArgs(model=model), factory="server_overhead:make"))


class Client:
    """One connection: sends the same request again and again, and reads to the end of each answer."""

    def __init__(self, port: int, tokens: int, stream: bool):
        self._port = port
        self._stream = stream
        self._tokens = tokens
        fields = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": tokens}
        body = json.dumps({"model": "bench", "stream": stream, **fields}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        self._request = head + b"content-length: %d\r\n\r\n" % len(body) + body
        self._end = b"0\r\n\r\n" if stream else b"}}}"
        self.events = 0
        self.answers = self.tokens = 0
        self.firsts: list[float] = []

    async def run(self, until: float, delay: float) -> None:
        """Closed loop, after a delay, so that the clients do not all ask at once."""
        await asyncio.sleep(delay)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        while time.monotonic() < until:
            started = time.monotonic()
            writer.write(self._request)
            first, tail = False, b""
            while not tail.endswith(self._end):
                data = await reader.read(1 << 16)
                assert data, "the server closed the connection"
                self.events += data.count(b'"content":') if self._stream else 0
                if not first and (b'"content":"' in data.replace(b'"content":""', b"") or not self._stream):
                    first = True
                    self.firsts.append(time.monotonic() - started)
                tail = (tail + data)[-8:]
            self.answers += 1
            self.tokens += self._tokens
        writer.close()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(pid: int, port: int, clients: int, tokens: int, stream: bool, seconds: float) -> dict[str, float]:
    # lengths differ by a quarter, so that answers do not end at once either
    crowd = [Client(port, tokens - tokens // 4 + index % (tokens // 2 + 1), stream) for index in range(clients)]
    spread = tokens * PACE if stream else 0.0
    before, started = cpu_seconds(pid), time.monotonic()
    await asyncio.gather(*(client.run(started + seconds, spread * i / clients) for i, client in enumerate(crowd)))
    wall, cpu = time.monotonic() - started, cpu_seconds(pid) - before
    firsts = sorted(first for client in crowd for first in client.firsts)
    events = sum(client.events for client in crowd) - sum(client.answers for client in crowd)  # not the role's
    answers = sum(client.answers for client in crowd)
    return {
        "events_a_cpu_second": events / cpu,
        "answers_a_cpu_second": answers / cpu,
        "events_a_second": events / wall,
        "answers_a_second": answers / wall,
        "events_a_token": events / (answers * tokens),
        "first_ms": 1e3 * statistics.median(firsts),
        "first_p99_ms": 1e3 * firsts[int(0.99 * (len(firsts) - 1))],
    }


def memory(pid: int) -> float:
    """MiB resident."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each case")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        sys.exit(serve(arguments.serve))
    sys.path.insert(0, str(HERE.parent.parent / "tests"))
    from tiny import write_tiny_llama

    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_llama(Path(folder) / "tiny")
        env = {**os.environ, "PYTHONPATH": str(HERE.parent)}
        command = [sys.executable, str(HERE), "--serve", str(model)]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, env=env, text=True)
        try:
            rows = run_cases(server, arguments.seconds)
        finally:
            server.terminate()
            server.wait(10)
    for row in rows:
        print(row.line())
    if arguments.json:
        write_results(arguments.json, "server overhead", rows, "uvicorn", "pyzmq", "msgspec")


def run_cases(server: subprocess.Popen[str], seconds: float) -> list[Row]:
    assert server.stderr is not None
    port = 0
    for line in server.stderr:
        match = re.search(r"listening at http://[^:]+:(\d+)", line)
        port = int(match[1]) if match else port
        if "INFO ready" in line:
            break
    pid = server.pid
    asyncio.run(measure(pid, port, 8, 8, True, 1.0))  # warm
    one = asyncio.run(measure(pid, port, 1, 2, True, seconds))
    streams = asyncio.run(measure(pid, port, 64, 100, True, seconds))
    crowd = asyncio.run(measure(pid, port, 256, 60, True, 2 * seconds))
    before = memory(pid)
    short = asyncio.run(measure(pid, port, 16, 1, False, 2 * seconds))
    grown = memory(pid) - before
    for name, found in (("1 stream", one), ("64 streams", streams), ("256 streams", crowd), ("short", short)):
        print(name, {key: round(value, 2) for key, value in found.items()}, file=sys.stderr)
    tokens, answers = streams["events_a_cpu_second"], short["answers_a_cpu_second"]
    return [
        Row("streamed tokens a CPU second, 64 streams", "1/s", "higher", tokens, TOKENS_A_SECOND, "target"),
        Row("short requests a CPU second, 16 clients", "1/s", "higher", answers, REQUESTS_A_SECOND, "target"),
        Row("first token, 1 client", "ms", "lower", one["first_ms"], TTFT, "target"),
        Row("first token p99, 256 streams", "ms", "lower", crowd["first_p99_ms"], TTFT_P99, "target"),
        Row(f"memory grown over {short['answers_a_second'] * 2 * seconds:.0f} short requests", "MiB", "lower", grown),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
