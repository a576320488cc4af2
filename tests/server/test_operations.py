"""The routes that operators and tools use."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest
from harness import CHAT, TEXT, Server, serve_command, strict, until


def test_models(server):
    assert [each["id"] for each in server.get("/v1/models").json["data"]] == ["tiny"]
    assert server.get("/v1/models/tiny").json["max_model_len"] == 512
    assert server.get("/v1/models/other").status == 404
    wrong = server.text(model="other", max_tokens=1)
    assert wrong.status == 404 and wrong.json["error"]["code"] == "model_not_found"
    assert server.text(model="tiny", max_tokens=1).json["model"] == "tiny"


def test_tokens_there_and_back(server):
    text = "Grüße, 世界 <|end|>"
    tokens = server.post("/tokenize", prompt=text, return_token_strs=True).json
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert server.post("/detokenize", tokens=tokens["tokens"]).json["prompt"] == text
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "hi"}]).json
    assert server.post("/detokenize", tokens=chat["tokens"]).json["prompt"] == "<|user|>hi<|end|><|assistant|>"
    assert server.chat(max_tokens=1).json["usage"]["prompt_tokens"] == chat["count"]
    for body in ({"tokens": [260]}, {"tokens": [-1]}, {"tokens": ["a"]}, {"tokens": "a"}, {}):
        assert server.post("/detokenize", body).status == 400


def test_paths_that_do_not_exist(server):
    for path in (
        "/web/",
        "/web/../run.py",
        "/web/%2e%2e/run.py",
        "/v1",
        "/v1/completions/",
        "/../etc/passwd",
        "/%2e%2e/x",
        "/requests//bill",
    ):
        reply = server.get(path)
        assert reply.status == 404 and reply.message
    assert server.ask("PUT", CHAT).status == 405
    assert server.ask("HEAD", "/health").data == b""


def test_metrics(server):
    names = ("completion_finish", "requests_total")
    before = server.metric(f"headrace_{names[1]}", route="chat", outcome="length")
    tokens = server.metric("headrace_generated_tokens_total")
    server.chat(max_tokens=5, ignore_eos=True, stream=True)
    until(lambda: server.metric("headrace_requests_total", route="chat", outcome="length") == before + 1)
    assert server.metric("headrace_generated_tokens_total") == tokens + 5
    page = server.get("/metrics").data.decode()
    for name in ("time_to_first_token", "inter_token", "queue", "request"):
        assert server.metric(f"headrace_{name}_seconds_count") > 0, name
    for bound in ("host", "bandwidth", "compute"):
        assert f'headrace_step_seconds_total{{bound="{bound}"}}' in page
    assert server.metric("headrace_steps_total") == server.metric("headrace_engine_steps_total") > 0
    assert server.metric("headrace_engine_up") == 1
    assert not re.search(r"\bnan\b", page, re.IGNORECASE)


def test_cached_tokens(server):
    prompt = "the very same words, asked for twice, are found in the cache"
    first, second = (server.text(prompt, max_tokens=1).json["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]


def test_the_ledger(server):
    server.text(max_tokens=3)
    reply = server.get("/ledger?last=2")
    records = [strict(line) for line in reply.data.splitlines()]
    assert len(records) == 2 and records[0]["step_id"] + 1 == records[1]["step_id"]
    assert all(record["bound"] in ("host", "bandwidth", "compute") for record in records)
    for query in ("last=0", "last=x", "last=100000", "last=", "last=%D9%A3", "last=+5"):
        assert server.get(f"/ledger?{query}").status == 400


def test_the_ledger_as_it_grows(server):
    import socket

    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET /ledger?last=1 HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\n\r\n")
        data = connection.recv(1 << 16)
        server.text(max_tokens=3, ignore_eos=True)
        while data.count(b'"step_id"') < 4:
            data += connection.recv(1 << 16)
    assert b"text/event-stream" in data


def test_bills(server):
    for fields in ({"n": 1}, {"n": 2, "temperature": 1}):
        reply = server.text(max_tokens=4, ignore_eos=True, **fields).json
        bill = server.get(f"/requests/{reply['id']}/bill").json
        assert bill["request_id"] == reply["id"] and bill["output_tokens"] == 4 * fields["n"]
    assert server.get("/requests/nobody/bill").status == 404


def test_version(server):
    assert server.get("/version").json["version"]


def test_bad_starts_say_why(tiny_model, server):
    for options, words in (
        (["-m", "/nonexistent/model"], "no model at"),
        (["-m", str(tiny_model), "--max-model-len", "100000"], "max_model_len"),
        (["-m", str(tiny_model), "--port", str(server.port)], "cannot listen"),
    ):
        command = serve_command(tiny_model)[:4] + options
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 2 and words in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_posts_without_a_body(server):
    for path in (CHAT, TEXT):
        assert server.ask("POST", path, None).status == 400


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="reads Linux's /proc/PID/task/*/schedstat")
def test_an_engine_without_work_takes_no_processor(tiny_model):
    """Nor do the threads of its kernels and of numpy's, which may spin for a moment only: clients are served on the
    same processors."""
    with Server(serve_command(tiny_model, "--num-threads", "2"), {"HEADRACE_NATIVE": "1"}) as server:

        def spent() -> float:
            """Seconds of processor time of the engine's threads."""
            tasks = Path(f"/proc/{server.engine_pid}/task").iterdir()
            return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

        server.text("a" * 200, max_tokens=20, ignore_eos=True)
        before = spent()
        time.sleep(0.5)
        assert spent() - before < 0.02
