"""`headrace bench serve`: workloads and arrivals, what is counted, and a run against a scripted server."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import threading
import xml.etree.ElementTree as ElementTree
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headrace.bench.serving import bench
from headrace.bench.serving.client import Answer, Client, ServerError
from headrace.bench.serving.load import Pattern, Run, measure_scale
from headrace.bench.serving.plot import Chart, cumulative, write_svg
from headrace.bench.serving.summary import Objective, percentile, summarise
from headrace.bench.serving.workload import TokensPerWord, Workload, arrival_times
from headrace.cli import main as cli

SCALE = TokensPerWord(2.0, 10.0)


class Scripted(BaseHTTPRequestHandler):
    """Counts two tokens a word and ten besides, streams as many as asked for; the word "boom" is refused."""

    protocol_version = "HTTP/1.1"
    bodies: list[dict] = []  # noqa: RUF012
    usage = True
    reasoning = 0  # so many pieces are of reasoning, and a first token has no text at all

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "models/scripted.gguf"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        text = body["prompt"] if "prompt" in body else " ".join(m["content"] for m in body["messages"])
        if "boom" in text:
            self._send(429, b'{"error": {"message": "no more"}}')
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number in range(body["max_tokens"]):
            piece = f"w{number} "
            choice = {"text": piece} if "prompt" in body else {"delta": {"content": piece}}
            if number < self.reasoning:
                choice = {"delta": {"content": None, "reasoning_content": piece} if number else {}}
            self._chunk(json.dumps({"choices": [choice]}))
        if self.usage:
            usage = {"prompt_tokens": 2 * len(text.split()) + 10, "completion_tokens": body["max_tokens"]}
            self._chunk(json.dumps({"choices": [], "usage": usage}))
        self._chunk("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def scripted():
    Scripted.bodies, Scripted.usage, Scripted.reasoning = [], True, 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


# -- workloads


def test_lengths_are_in_the_servers_tokens():
    workload = Workload(count=400, prompt_len=100, output_len=20, spread=0.2)
    turns = [conversation.turns[0] for conversation in workload.conversations(SCALE)]
    tokens = [2 * len(turn.text.split()) + 10 for turn in turns]
    assert 78 <= min(tokens) < 90 and 110 < max(tokens) <= 122 and abs(statistics.mean(tokens) - 100) < 3
    assert {turn.max_tokens for turn in turns} == set(range(16, 25))
    assert workload.conversations(SCALE) == workload.conversations(SCALE)


def test_conversational_lengths_have_a_long_tail():
    turns = [c.turns[0] for c in Workload(kind="sharegpt", count=4000).conversations(TokensPerWord(1.0, 0.0))]
    prompts = sorted(len(turn.text.split()) for turn in turns)
    assert abs(prompts[2000] - 70) < 8 and statistics.mean(prompts) > 1.8 * prompts[2000] and prompts[-1] == 1024
    outputs = sorted(turn.max_tokens for turn in turns)
    assert abs(outputs[2000] - 110) < 10 and outputs[-1] == 800 and outputs[0] >= 4


def test_prefixes_are_shared_and_turns_follow():
    shared = Workload(kind="shared-prefix", count=40, prefix_len=110, num_prefixes=3, prompt_len=50)
    beginnings = {" ".join(c.turns[0].text.split()[:50]) for c in shared.conversations(SCALE)}
    assert len(beginnings) == 3
    assert len(set(c.turns[0].text for c in shared.conversations(SCALE))) == 40
    assert all(len(c.turns) == 5 for c in Workload(kind="multi-turn", num_turns=5).conversations(SCALE))


def test_arrivals():
    def gaps(arrivals, burstiness=0.25):
        times = list(itertools.islice(arrival_times(arrivals, 5.0, burstiness, 3), 8000))
        assert times[0] == 0.0 and times == sorted(times)
        return [b - a for a, b in itertools.pairwise(times)]

    for found, variance in ((gaps("poisson"), 1.0), (gaps("bursty"), 4.0), (gaps("bursty", 1.0), 1.0)):
        mean = statistics.mean(found)
        assert mean == pytest.approx(0.2, rel=0.08)
        assert statistics.variance(found) / mean**2 == pytest.approx(variance, rel=0.2)


@pytest.mark.parametrize("wrong", [{"kind": "odd"}, {"count": 0}, {"spread": 2.0}, {"num_turns": 0}])
def test_workloads_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="must be"):
        Workload(**wrong)


# -- what is counted


def answer(times, ended, error="", **fields):
    return Answer(0.0, list(times), ended, error=error, **fields)


def test_latencies():
    found = answer([0.1, 0.2, 0.5], 0.6, output_tokens=5)
    assert (found.ttft, found.tpot) == (0.1, pytest.approx(0.1)) and found.gaps == pytest.approx([0.1, 0.3])
    assert answer([0.1], 0.1).tpot is None and answer([0.1, 0.3], 0.3).tokens == 2


def test_goodput_counts_failures_and_lateness():
    objective = Objective(ttft=0.2, tpot=0.1)
    answers = [
        answer([0.1, 0.15], 0.2), answer([0.3, 0.35], 0.4), answer([0.1, 0.4], 0.4), answer([0.1], 0.1),
        answer([], 0.0, "gone"),
    ]  # fmt: skip
    summary = summarise(Run(answers, seconds=2.0), objective)
    assert summary.good == pytest.approx(2 / 5) and summary.goodput == pytest.approx(1.0)
    assert summary.failed == 1 and summary.errors == ("1 x gone",)
    assert summary.ttft[50] == pytest.approx(100) and summary.ttft[99] == pytest.approx(300)
    assert objective.label == "ttft 200 ms, tpot 100 ms"
    assert "40% good" in "\n".join(summary.lines()) and json.dumps(summary.to_json())


def test_percentiles_are_values():
    values = list(range(1, 101))
    assert [percentile(values, share) for share in (1, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
    assert percentile([7], 50) == 7


# -- against a server


def measure(url, workload, pattern, chat=True):
    async def work():
        server = bench.Server("x", Client(url, chat=chat))
        await bench.prepare([server])
        return await server.measure(workload, pattern, Objective(ttft=60.0)), server

    return asyncio.run(work())


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("pattern", [Pattern(clients=3), Pattern(arrivals="bursty", rate=200.0)])
def test_a_run(scripted, chat, pattern):
    workload = Workload(count=12, prompt_len=60, output_len=5, spread=0.0)
    summary, server = measure(scripted, workload, pattern, chat)
    assert server.scale == SCALE and summary.failed == 0 and summary.requests == 12 and summary.good == 1.0
    assert (summary.prompt_tokens, summary.output_tokens) == (12 * 60, 12 * 5)
    assert summary.ttft[50] <= summary.e2e[50] and len(summary.itl) == 3


def test_turns_hold_what_was_said(scripted):
    summary, _ = measure(scripted, Workload(kind="multi-turn", count=2, num_turns=3, output_len=4), Pattern(clients=1))
    assert summary.requests == 6
    talk = Scripted.bodies[-1]["messages"]
    assert [message["role"] for message in talk] == ["user", "assistant", "user", "assistant", "user"]
    assert talk[1]["content"].startswith("w0 w1 ")


def test_a_server_that_does_not_count(scripted):
    Scripted.usage = False
    summary, server = measure(scripted, Workload(count=3, output_len=7, spread=0.0), Pattern())
    assert server.scale == TokensPerWord(1.0, 0.0) and summary.output_tokens == 21


def test_reasoning_counts_and_is_not_said_again(scripted):
    Scripted.reasoning = 4
    workload = Workload(kind="multi-turn", count=1, num_turns=2, output_len=6, spread=0.0)
    summary, server = measure(scripted, workload, Pattern(clients=1))
    assert server.scale == SCALE and summary.failed == 0 and summary.output_tokens == 12
    assert [len(each.times) for each in server.runs[0][0].answers] == [5, 5]
    assert Scripted.bodies[-1]["messages"][1]["content"] == "w4 w5 "


def test_what_a_server_refuses_is_told(scripted):
    async def work():
        client = Client(scripted)
        return await client.ask([{"role": "user", "content": "boom"}], 3)

    found = asyncio.run(work())
    assert found.error == "status 429: no more" and found.status == 429


def test_no_server():
    with pytest.raises(ServerError, match="no server answers"):
        asyncio.run(measure_scale(Client("http://127.0.0.1:9")))
    with pytest.raises(ServerError, match="no address"):
        Client("ftp://x")


def test_saturation_finds_the_rate_between():
    """A server of which is known what it sustains: below 10 a second every answer is good."""

    class Known(bench.Server):
        async def measure(self, workload, pattern, objective):
            good = pattern.rate <= 10.0
            answers = [answer([0.1 if good else 9.0], 9.0) for _ in range(workload.count)]
            return summarise(Run(answers, seconds=workload.count / pattern.rate), objective)

    for start in (1.0, 64.0):
        tell: list[str] = []
        probes = asyncio.run(
            bench.saturate(
                Known("x", Client("http://x")), Workload(), Pattern(rate=start), Objective(ttft=1.0), 5, tell.append
            )
        )
        assert 9.0 <= bench.highest(probes) <= 10.0 and len(probes) < 14 and len(tell) == len(probes)
    assert bench.highest([]) == 0.0


def test_charts_are_xml(tmp_path):
    lines = {"a <b>": cumulative([3.0, 1.0, 2.0]), "c": [(0.0, float("nan")), (5.0, 1.0)]}
    write_svg(tmp_path / "x.svg", [Chart("T & t", "ms", "part", lines, 1.0), Chart("empty", "x", "y", {})])
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    assert len(root.findall(".//{*}polyline")) == 2 and "a <b>" in "".join(root.itertext())


# -- the command


def command(*words):
    return cli.main(["bench", "serve", *words])


def test_the_command(scripted, tmp_path, capsys):
    out, plot = tmp_path / "r.json", tmp_path / "p.svg"
    words = [
        "--url",
        scripted,
        "--peer-url",
        scripted,
        "--peer-name",
        "peer 1",
        "--num-requests",
        "6",
        "--ttft-slo",
        "5000",
    ]
    assert command(*words, "--clients", "1", "--clients", "2", "--json", str(out), "--plot", str(plot)) == 0
    value = json.loads(out.read_text())
    cases = {row["case"]: row for row in value["rows"]}
    assert cases["scripted serve random 128+64 2 clients ttft p50"]["peer_name"] == "peer 1"
    assert cases["scripted serve random 128+64 1 client goodput (ttft 5000 ms)"]["ratio"] > 0
    assert len(value["details"]) == 4 and plot.read_text().startswith("<svg")
    assert "6 requests" in capsys.readouterr().out


def test_the_command_saturates(scripted, tmp_path, capsys):
    out = tmp_path / "r.json"
    words = ["--saturate", "--ttft-slo", "0.0001", "--rate", "400", "--seconds", "0.02", "--output-len", "1"]
    assert command("--url", scripted, *words, "--json", str(out)) == 0  # nothing keeps that
    assert "0.00 requests/s" in capsys.readouterr().out
    assert json.loads(out.read_text())["rows"][0]["headrace"] == 0.0


@pytest.mark.parametrize("words", [[], ["--saturate", "--ttft-slo", "0.0001", "--seconds", "0.02"]])
def test_a_client_that_cannot_keep_up_says_so(scripted, monkeypatch, capsys, words):
    sent = bench.run

    async def late(*arguments):
        found = await sent(*arguments)
        found.late = 0.5
        return found

    monkeypatch.setattr(bench, "run", late)
    pattern = ["--arrivals", "poisson", "--rate", "400", "--num-requests", "4", "--output-len", "1"]
    assert command("--url", scripted, *pattern, *words) == 0
    assert "0.50 s late" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers"),
        (["--rate", "0"], "--rate must be above 0"),
        (["--rate", "inf"], "--rate must be above 0, and finite"),
        (["--timeout", "1e-9"], "TimeoutError"),
        (["--clients", "0"], "--clients must be"),
        (["--num-requests", "0"], "count must be"),
        (["--saturate"], "needs an objective"),
        (["--json", "/nonexistent/x.json"], "there is no folder"),
    ],
)
def test_what_cannot_be_measured(words, message, capsys):
    assert command(*words) == 2
    assert message in capsys.readouterr().err


def test_the_options_are_those_of_the_workload():
    parser = argparse.ArgumentParser()
    from headrace.bench.serving import workload
    from headrace.cli import bench_serve

    bench_serve.add_command(parser.add_subparsers())
    assert bench_serve._KINDS == workload.KINDS and bench_serve._ARRIVALS == workload.ARRIVALS
