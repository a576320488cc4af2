"""Batch files: every line answered once, whatever the lines and however often the process dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.cli.main import EXIT_INTERRUPTED, main
from headrace.frontend.batch import BatchError, run_batch_file
from tiny import write_tiny_llama

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, max_num_seqs=4) as made:
        yield made


def chat(custom_id: str, text: str = "hi", **fields) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **GREEDY, **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body})


def complete(custom_id: str, prompt="hi", **fields) -> str:
    body = {"model": "tiny", "prompt": prompt, **GREEDY, **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body})


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", errors="surrogatepass")
    return path


def run(llm: LLM, source: Path, target: Path, max_in_flight: int = 3):
    return run_batch_file(llm.engine, source, target, SamplingParams(), max_in_flight=max_in_flight)


def results(path: Path) -> dict[str | int, dict]:
    values = [json.loads(line) for line in path.read_text().splitlines()]
    keys = [value["custom_id"] or value["error"]["line"] for value in values]
    assert len(set(keys)) == len(keys), "a line was answered twice"
    return dict(zip(keys, values, strict=True))


def test_answers_are_those_of_the_engine(llm, tmp_path):
    source = write(
        tmp_path / "in.jsonl",
        chat("a", "hello"), complete("b", ["x", "y"], n=2, temperature=1, seed=5), "",
        chat("c", logprobs=True, top_logprobs=2), complete("d", [1, 2, 3], logprobs=1),
    )  # fmt: skip
    summary = run(llm, source, tmp_path / "out.jsonl")
    assert (summary.num_lines, summary.num_done, summary.num_failed, summary.complete) == (4, 4, 0, True)
    found = results(tmp_path / "out.jsonl")
    assert {value["response"]["status_code"] for value in found.values()} == {200}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    body = found["a"]["response"]["body"]
    (expected,) = llm.chat([{"role": "user", "content": "hello"}], params)
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {
        "role": "assistant", "content": expected.outputs[0].text, "refusal": None
    }  # fmt: skip
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 6
    body = found["b"]["response"]["body"]
    expected = llm.generate(["x", "y"], params.with_(n=2, temperature=1, seed=5))
    assert [choice["text"] for choice in body["choices"]] == [c.text for output in expected for c in output.outputs]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["completion_tokens"] == 24 == body["usage"]["total_tokens"] - 2
    content = found["c"]["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert len(content) == 6 and all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"] <= 0
    logprobs = found["d"]["response"]["body"]["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 6
    assert summary.output_tokens == 6 + 24 + 6 + 6 and "output tokens/s" in summary.line()


def test_wrong_lines_become_error_lines(llm, tmp_path):
    good = json.loads(chat("x"))
    lines = {
        "not json": "invalid_json",
        "[1]": "invalid_request",
        json.dumps({**good, "custom_id": None}): "invalid_custom_id",
        json.dumps({**good, "custom_id": 7}): "invalid_custom_id",
        json.dumps({**good, "custom_id": "\ud800"}): "invalid_custom_id",
        json.dumps({**good, "custom_id": "get", "method": "GET"}): "invalid_method",
        json.dumps({**good, "custom_id": "url", "url": "/v1/embeddings"}): "invalid_url",
        json.dumps({**good, "custom_id": "list-url", "url": []}): "invalid_url",
        json.dumps({**good, "custom_id": "more", "priority": 3}): "unknown_field",
        "[" * 100_000: "invalid_json",
    }
    bodies = {
        "no-body": {"body": None},
        "type": {"body": {**good["body"], "temperature": "hot"}},
        "stream": {"body": {**good["body"], "stream": True}},
        "empty": {"body": {**good["body"], "messages": []}},
        "long": {"body": {**good["body"], "messages": [{"role": "user", "content": "x" * 600}]}},
        "surrogate": {"body": {**good["body"], "messages": [{"role": "user", "content": "\ud800"}]}},
        "vocabulary": {"url": COMPLETIONS, "body": {"prompt": [10**9]}},
        "half": {"url": COMPLETIONS, "body": {"prompt": ["fine", "x" * 600]}},
    }
    refused = [json.dumps({**good, "custom_id": name, **changes}) for name, changes in bodies.items()]
    source = write(tmp_path / "in.jsonl", *lines, *refused, chat("good"))
    with source.open("ab") as file:
        file.write(b"\xff\xfe\n" + complete("last").encode())  # and no newline at the end
    summary = run(llm, source, tmp_path / "out.jsonl")
    assert summary.complete and summary.num_failed == len(lines) + len(bodies) + 1
    found = results(tmp_path / "out.jsonl")
    assert found["good"]["response"]["status_code"] == found["last"]["response"]["status_code"] == 200
    for number, code in enumerate(lines.values(), 1):
        key = {6: "get", 7: "url", 8: "list-url", 9: "more"}.get(number, number)
        assert found[key]["error"]["code"] == code and found[key]["response"] is None
        assert found[key]["error"]["line"] == number
    for name in bodies:
        response = found[name]["response"]
        assert response["status_code"] == 400 and response["body"]["error"]["message"] and found[name]["error"] is None
    assert found["type"]["response"]["body"]["error"]["param"] == "temperature"
    assert not llm.engine.has_work
    before = (tmp_path / "out.jsonl").read_bytes()
    again = run(llm, source, tmp_path / "out.jsonl")  # errors are answers too
    assert again.num_done == 0 and again.complete and (tmp_path / "out.jsonl").read_bytes() == before


def test_a_torn_line_is_taken_off_and_the_rest_kept(llm, tmp_path):
    source, target = write(tmp_path / "in.jsonl", *(chat(f"c{n}") for n in range(8))), tmp_path / "out.jsonl"
    run(llm, source, target)
    whole = target.read_bytes().splitlines(keepends=True)
    for torn in (b"", whole[3][:5], whole[3][:40], whole[3][:-1], b"\x00" * 30):
        target.write_bytes(b"".join(whole[:3]) + torn)
        summary = run(llm, source, target)
        assert (summary.num_skipped, summary.num_done) == (3, 5)
        assert len(results(target)) == 8 and target.read_bytes().startswith(b"".join(whole[:3]))


def test_an_engine_that_dies_leaves_a_resumable_file(llm, tmp_path, monkeypatch):
    source, target = write(tmp_path / "in.jsonl", *(chat(f"c{n}") for n in range(12))), tmp_path / "out.jsonl"
    step, left = llm.engine.step, 10

    def dying():
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine, "step", dying)
        run(llm, source, target)
    first = len(results(target))
    assert 0 < first < 12 and not llm.engine.core.scheduler.has_work
    summary = run(llm, source, target)
    assert summary.num_skipped == first and summary.num_done == 12 - first and len(results(target)) == 12


def test_no_more_than_allowed_are_in_flight(llm, tmp_path, monkeypatch):
    seen = []
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (seen.append(len(llm.engine._streams)), step())[1])
    run(llm, write(tmp_path / "in.jsonl", *(chat(f"c{n}") for n in range(9))), tmp_path / "out.jsonl", 2)
    assert max(seen) == 2


def test_what_makes_no_sense_is_refused_up_front(llm, tmp_path):
    source, target = write(tmp_path / "in.jsonl", chat("a"), chat("b"), complete("a")), tmp_path / "out.jsonl"
    with pytest.raises(BatchError, match="'a' is on lines 1 and 3"):
        run(llm, source, target)
    assert not target.exists()
    write(source, chat("a"))
    with pytest.raises(BatchError, match="is the input"):
        run(llm, source, source)
    write(target, '{"id": "batch_req_z", "custom_id": "z", "response": null, "error": null}')
    with pytest.raises(BatchError, match="another batch"):
        run(llm, source, target)
    write(target, "something", "else")
    with pytest.raises(BatchError, match="line 1: not a line of results"):
        run(llm, source, target)
    assert target.read_text() == "something\nelse\n"
    for other in ("a note", "a note\n", '{"id": 3}\n', '{"custom_id": "a", "response": null, "error": null}\n'):
        target.write_text(other)  # one line that is not ours, torn or not, stays as it is
        with pytest.raises(BatchError, match="line 1: not a line of results"):
            run(llm, source, target)
        assert target.read_text() == other
    for no_file in (Path(os.devnull), tmp_path):
        with pytest.raises(BatchError, match="not a regular file"):
            run(llm, source, no_file)
    with pytest.raises(OSError):
        run(llm, tmp_path / "none.jsonl", target)
    with pytest.raises(BatchError, match="at least one"):
        run(llm, source, target, 0)


def test_two_runs_cannot_write_one_file(llm, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    source, target = write(tmp_path / "in.jsonl", chat("a")), tmp_path / "out.jsonl"
    with open(target, "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BatchError, match="another process"):
            run(llm, source, target)
    assert run(llm, source, target).complete


def test_the_command(folder, tmp_path, capsys):
    source, target = write(tmp_path / "in.jsonl", chat("a"), "nonsense"), tmp_path / "out.jsonl"
    ledger = tmp_path / "ledger.jsonl"
    assert main(["batch", str(source), "-o", str(target), "-m", folder, "--ledger-jsonl", str(ledger)]) == 0
    err = capsys.readouterr().err
    assert "2 of 2 lines answered, 1 with errors" in err and "2/2" in err
    assert main(["explain", str(ledger)]) == 0 and "1 ended" in capsys.readouterr().out
    assert main(["batch", str(source), "-o", str(target), "-m", folder, "--quiet"]) == 0
    assert capsys.readouterr().err == "" and len(results(target)) == 2
    assert main(["batch", str(source), "-o", os.devnull, "-m", "/nowhere"]) == 2
    assert "not a regular file" in capsys.readouterr().err
    write(source, chat("a"), chat("a"))
    assert main(["batch", str(source), "-o", str(target), "-m", "/nowhere"]) == 2
    assert "lines 1 and 2" in capsys.readouterr().err


def test_an_interruption_before_the_first_answer_tells_the_true_numbers(folder, tmp_path, capsys, monkeypatch):
    from headrace.frontend import batch

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(batch._Runner, "run", interrupted)
    source = write(tmp_path / "in.jsonl", chat("a"), chat("b"))
    assert main(["batch", str(source), "-o", str(tmp_path / "out.jsonl"), "-m", folder]) == EXIT_INTERRUPTED
    err = capsys.readouterr().err
    assert "0 of 2 lines answered" in err and "2 lines are left" in err


def _command(folder: str, source: Path, target: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "headrace", "batch", str(source), "-o", str(target), "-m", folder, "--quiet"]
    return subprocess.Popen([*command, "--max-num-seqs", "2", "--max-in-flight", "3"], stderr=subprocess.PIPE)


def _wait_for_lines(process: subprocess.Popen[bytes], target: Path, count: int) -> None:
    for _ in range(6000):
        if process.poll() is not None or (target.exists() and target.read_bytes().count(b"\n") >= count):
            return
        time.sleep(0.01)
    raise AssertionError("nothing was written for a minute")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_kill_9_loses_and_repeats_nothing(folder, tmp_path):
    number = 60
    source = write(tmp_path / "in.jsonl", *(chat(f"c{n}", str(n), max_tokens=60) for n in range(number)))
    target = tmp_path / "out.jsonl"
    deaths = 0
    for goal in (5, 20, 35):
        process = _command(folder, source, target)
        _wait_for_lines(process, target, goal)
        process.send_signal(signal.SIGKILL)
        deaths += process.wait() == -signal.SIGKILL
        if goal == 20:
            with target.open("ab") as file:  # as if the kill had come within a write
                file.write(b'{"id": "batch_req_torn", "custom_')
    assert deaths >= 2
    process = _command(folder, source, target)
    _wait_for_lines(process, target, 40)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode in (0, EXIT_INTERRUPTED)
    if process.returncode:
        assert b"the same command goes on" in err
    assert _command(folder, source, target).wait() == 0
    found = results(target)
    assert set(found) == {f"c{n}" for n in range(number)}
    fresh = tmp_path / "fresh.jsonl"
    assert _command(folder, source, fresh).wait() == 0
    texts = [
        {key: value["response"]["body"]["choices"] for key, value in results(path).items()} for path in (target, fresh)
    ]
    assert texts[0] == texts[1]
