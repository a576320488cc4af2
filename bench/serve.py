"""The server beside llama.cpp's, on this machine: latency and throughput with 1, 8 and 32 clients, in turns in one run.

    .venv/bin/python bench/serve.py -m MODEL.gguf --peer-python PYTHON [--json bench/results/cpu/serve.json]

PYTHON is that of an environment with `pip install 'llama-cpp-python[server]'`; without it Headrace is measured alone.
Both servers run all the while with as many threads, and only one of them has requests at a time. Prompts are random
words, the same for both; answers have the same lengths, since no token that ends a text may come. llama.cpp's Python
server runs one request at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from headrace.bench.results import write_results
from headrace.bench.serving import bench
from headrace.bench.serving.client import Client
from headrace.bench.serving.load import Pattern
from headrace.bench.serving.plot import write_svg
from headrace.bench.serving.summary import Objective
from headrace.bench.serving.workload import KINDS, Workload
from headrace.device.cpu import cpu_facts
from headrace.loading.checkpoint import open_checkpoint
from headrace.loading.store import resolve_model

LOAD_SECONDS = 120.0


class Process:
    """A server that was started here, and what it said."""

    def __init__(self, command: Sequence[str], port: int):
        self.url = f"http://127.0.0.1:{port}"
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self._process = subprocess.Popen(command, stdout=self._said, stderr=self._said)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + LOAD_SECONDS
        ask = urllib.request.Request(self.url + "/v1/completions", b'{"prompt": "a", "max_tokens": 1}')
        ask.add_header("content-type", "application/json")
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                urllib.request.urlopen(ask, timeout=20).read()
                return
            except OSError:
                time.sleep(0.2)
        self._said.seek(0)
        raise SystemExit(f"{self.url} did not start:\n{self._said.read().decode(errors='replace')[-2000:]}")

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._said.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="a GGUF file; none: the default model")
    parser.add_argument("--peer-python", metavar="FILE", help="the Python that has llama-cpp-python[server]")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3, help="requests of each client in a run (3)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each; the middle one counts (3)")
    parser.add_argument("--workload", choices=KINDS, default="random")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=cpu_facts().num_threads)
    parser.add_argument("--port", type=int, default=18600, help="the first of two ports (18600)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    path = resolve_model(arguments.model)
    checkpoint = open_checkpoint(path)
    threads, port = str(arguments.threads), arguments.port
    processes = [
        Process(
            [sys.executable, "-m", "headrace", "serve", "-m", str(path), "--port", str(port), "--num-threads", threads,
             "--served-model-name", checkpoint.name, "--no-log-requests"],
            port,
        )
    ]  # fmt: skip
    peer = None
    if arguments.peer_python is not None:
        code = "import importlib.metadata as m; print(m.version('llama-cpp-python'))"
        version = subprocess.run([arguments.peer_python, "-c", code], capture_output=True, text=True, check=True)
        peer = f"llama.cpp (llama-cpp-python {version.stdout.strip()} server)"
        command = [
            arguments.peer_python, "-m", "llama_cpp.server", "--model", str(path), "--port", str(port + 1), "--n_ctx",
            "2048", "--n_threads", threads, "--n_threads_batch", threads, "--interrupt_requests", "False",
        ]  # fmt: skip
        processes.append(Process(command, port + 1))
    try:
        for process in processes:
            process.wait_ready()
        asyncio.run(measure(arguments, checkpoint.name, checkpoint.spec.eos_token_ids, processes, peer))
    finally:
        for process in processes:
            process.stop()


async def measure(
    arguments: argparse.Namespace, model: str, eos: Sequence[int], processes: Sequence[Process], peer: str | None
) -> None:
    servers = [
        bench.Server(name or "", Client(process.url, timeout=900))
        for name, process in zip(("headrace", peer), processes, strict=False)
    ]
    for server in servers:  # both know this field, one of them does not know ignore_eos
        server.client.extra["logit_bias"] = {str(each): -100 for each in eos}
    await bench.prepare(servers)
    rows, details = [], []
    for clients in arguments.clients:
        workload = Workload(
            kind=arguments.workload, count=max(4, clients * arguments.rounds), prompt_len=arguments.prompt_len,
            output_len=arguments.output_len,
        )  # fmt: skip
        pattern = Pattern(clients=clients)
        summaries = await bench.in_turns(
            servers, workload, pattern, Objective(), arguments.runs, lambda text: print(text, file=sys.stderr)
        )
        rows += bench.rows(model, workload, pattern, summaries, peer, arguments.runs, Objective())
        details += [
            {"server": server.name, "pattern": pattern.label, **summary.to_json()}
            for server, summary in zip(servers, summaries, strict=True)
        ]
        if any(summary.failed for summary in summaries):
            raise SystemExit(f"requests failed: {[summary.errors for summary in summaries]}")
    for row in rows:
        print(row.line())
    if arguments.json:
        more = {"threads": arguments.threads, "details": details}
        write_results(arguments.json, "serve", rows, "uvicorn", "pyzmq", "msgspec", more=more)
    if arguments.plot:
        write_svg(arguments.plot, bench.charts(servers))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
