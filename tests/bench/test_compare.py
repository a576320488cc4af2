"""Comparisons: the protocol with a fake peer, turns, rows, and what a peer may do wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace import LLM
from headrace.bench import peer_script
from headrace.bench.compare import PeerChoice, Work, compare, describe, limit_share
from headrace.bench.hf_export import write_hf_folder
from headrace.bench.measure import random_prompts, run_batch
from headrace.bench.peer import SCRIPT, Peer, PeerError
from headrace.bench.start import as_installed, own_start
from headrace.cli.main import main
from headrace.loading.checkpoint import open_checkpoint
from tiny import write_tiny_llama

FAKE = str(Path(__file__).with_name("fake_peer.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def test_a_peer_answers():
    with Peer(FAKE) as peer:
        peer.load("model", "float32", 2)
        assert peer.name == "fake 1.0 float32"
        timing = peer.run([[1, 2], [3, 4]], 6)
        assert (timing.num_tokens, timing.tokens_by_then) == (12, 2)
        assert timing.decode_rate == pytest.approx(10.0) and timing.output_rate == pytest.approx(8.0)
    peer.close()


@pytest.mark.parametrize(
    ("manner", "words"),
    [
        ("crash", "exit code 3: a dreadful thing happened"),
        ("silent", "did not answer within 0.2 s"),
        ("lazy", "did other work than asked"),
        ("babble", "'hello.n', which is not JSON"),
    ],
)
def test_what_a_peer_does_wrong_is_said(manner, words):
    with Peer(FAKE) as peer:
        peer.load(f"model-{manner}", "float32", 1)
        if manner == "silent":
            peer._seconds = 0.2
        with pytest.raises(PeerError, match=words):
            peer.run([[1, 2]], 3)


def test_peers_that_cannot_be():
    with pytest.raises(PeerError, match="unknown peer 'vllm'"):
        Peer("vllm")
    with pytest.raises(PeerError, match="cannot run /nowhere/python"):
        Peer("transformers", "/nowhere/python")
    with Peer(FAKE) as peer, pytest.raises(PeerError, match="no such model"):
        peer.load("model-unloadable", "float32", 1)


def test_the_real_script_stands_alone():
    """It runs isolated, keeps its answers apart from what is printed, and reports errors."""
    for kind in peer_script.PEERS:
        lines = [{"op": "load", "model": "/nowhere", "dtype": "float32", "threads": 1}, {"op": "quit"}]
        if kind == "transformers":  # importing torch takes seconds: a run without a model fails as well
            lines[0] = {"op": "run", "prompts": [[1]], "num_tokens": 1}
        done = subprocess.run(
            [sys.executable, "-I", str(SCRIPT), kind],
            input="".join(json.dumps(line) + "\n" for line in lines),
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        (answer,) = map(json.loads, done.stdout.splitlines())
        assert done.returncode == 0 and answer["ok"] is False and answer["error"]


def test_sides_take_turns_and_rows_hold_medians(folder, monkeypatch):
    order: list[str] = []
    run = Peer.run
    monkeypatch.setattr(Peer, "run", lambda self, *work: (order.append("peer"), run(self, *work))[1])
    monkeypatch.setattr(
        "headrace.bench.compare.run_batch", lambda *work: (order.append("ours"), run_batch(*work))[1]
    )  # fmt: skip
    works = [Work("decode", 2, 8, 4), Work("ttft", 1, 16, 1), Work("offline", 3, 8, 4)]
    with LLM(str(folder)) as llm:
        rows = compare(llm, works, [PeerChoice(FAKE, sys.executable)], runs=3)
        what = describe(llm)
    assert order == ["ours", "peer", "peer", "ours", "ours", "peer", "peer", "ours"] * 3
    assert [row.case for row in rows] == [f"{what} decode batch 2", f"{what} ttft 16", f"{what} offline 3 x 8+4"]
    assert [(row.unit, row.better, row.runs) for row in rows] == [
        ("tok/s", "higher", 3), ("ms", "lower", 3), ("tok/s", "higher", 3)
    ]  # fmt: skip
    assert [row.peer for row in rows] == pytest.approx([6.0, 500.0, 8.0])
    assert {row.peer_name for row in rows} == {"fake 1.0 float32"}
    for row in rows:
        ratio = row.headrace / row.peer if row.better == "higher" else row.peer / row.headrace
        assert row.ratio == pytest.approx(ratio) and row.limit_share is not None and row.limit_share > 0
        assert "of the limit" in row.line() and "ratio" in row.line()
    assert limit_share([]) is None


def test_decoding_is_timed_once_every_request_has_begun(folder):
    """Prompts that are read in several steps are no part of it."""
    with LLM(str(folder), max_num_batched_tokens=16, max_num_seqs=4, prefix_caching=False) as llm:
        timing = run_batch(llm, random_prompts(llm.engine.spec.vocab_size, 3, 16), 5)
    assert 0 < timing.first_token < timing.all_started < timing.total
    assert timing.tokens_by_then > 3 and timing.num_tokens == 15
    assert timing.decode_rate == (15 - timing.tokens_by_then) / (timing.total - timing.all_started)


def test_no_run_finds_the_prefixes_of_another(folder):
    with LLM(str(folder)) as llm:
        prompts = random_prompts(llm.engine.spec.vocab_size, 2, 64)
        for _ in range(2):
            run_batch(llm, prompts, 2)
        assert llm.engine.ledger.totals.prompt_tokens == 256 and llm.engine.ledger.totals.cached_tokens == 0


def test_exported_weights_are_the_same_numbers(folder, tmp_path):
    ours = open_checkpoint(folder)
    again = open_checkpoint(write_hf_folder(ours, tmp_path / "exported"))
    assert set(again.names()) == set(ours.names())
    assert all(np.array_equal(again.read(name), ours.read(name)) for name in ours.names())
    assert again.spec == ours.spec
    windowed = open_checkpoint(write_tiny_llama(tmp_path / "windowed", window=8))
    with pytest.raises(ValueError, match="full attention"):
        write_hf_folder(windowed, tmp_path / "never")


def test_the_command(folder, tmp_path, capsys):
    path, ledger = tmp_path / "results.json", tmp_path / "ledger.jsonl"
    argv = ["bench", "compare", "-m", str(folder), "--runs", "1", "--output-len", "3", "--prompt-len", "8"]
    two = ["--peer", FAKE, "--peer", FAKE, "--peer-python", sys.executable, "--json", str(path)]
    works = ["--decode-batch", "2", "--offline", "3", "--ledger-jsonl", str(ledger)]
    assert main([*argv, *two, *works]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 4 and all(row["peer_name"] == "fake 1.0 float32" and row["ratio"] > 0 for row in rows)
    assert "ratio" in capsys.readouterr().out and ledger.exists()
    assert main([*argv, "--ttft", "8"]) == 0  # without peers: what the machine allows
    assert "of the limit" in capsys.readouterr().out


def test_a_peer_may_load_another_form_of_the_model(folder, tmp_path, capsys):
    other = tmp_path / "model-crash"
    other.touch()
    argv = ["bench", "compare", "-m", str(folder), "--runs", "1", "--ttft", "8", "--peer", FAKE]
    assert main([*argv, "--peer-model", str(other)]) == 2
    assert "a dreadful thing happened" in capsys.readouterr().err
    assert main([*argv, "--peer-model", ""]) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--peer", "vllm"], "unknown peer 'vllm'"),
        (["--peer", "llama.cpp"], "llama.cpp reads GGUF files"),
        (["--peer", "openvino"], "openvino reads GGUF files"),
        (["--peer", FAKE, "--peer-model", "/no/where"], "there is no /no/where for"),
        (["--peer", FAKE, "--peer-model", "", "--peer-model", ""], "1 --peer, but 2 --peer-model"),
        (["--peer", FAKE, "--peer-python", "a", "--peer-python", "b"], "1 --peer, but 2 --peer-python"),
        (["--decode-batch", "0"], "--decode-batch must be at least 1"),
        (["--decode-batch", "9", "--max-num-seqs", "4"], "raise --max-num-seqs"),
        (["--output-len", "1"], "--output-len must be at least 2"),
    ],
)
def test_bad_comparisons_are_one_line(folder, capsys, options, words):
    assert main(["bench", "compare", "-m", str(folder), "--runs", "1", *options]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert words in err and err.startswith("headrace: error: ")


def test_starts_of_whole_processes(folder, tmp_path, capsys):
    file = tmp_path / "start.json"
    arguments = ["--max-model-len", "128", "--mode", "exact", "--no-prefix-caching"]
    assert main(["bench", "compare", "-m", str(folder), *arguments, "--peer", FAKE, "--start", "--runs", "1",
                 "--json", str(file)]) == 0  # fmt: skip
    rows = json.loads(file.read_text())["rows"]
    assert [row["case"].split("exact ")[1] for row in rows] == ["start to first token", "peak memory"]
    first, peak = rows
    assert first["peer_name"] == "fake 1.0 float32" and first["unit"] == "s" and 0 < first["headrace"] < 30
    assert peak["unit"] == "MB" and 20 < peak["headrace"] < 2000 and 5 < peak["peer"] < 500


def test_starts_find_their_modules_compiled(folder, tmp_path, monkeypatch):
    """Peers do: their Python is isolated from a variable that would have ours compiled at every start."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")  # as if unset
    assert "PYTHONPYCACHEPREFIX" not in as_installed(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    own_start(folder, ["--max-model-len", "128"], as_installed(tmp_path))
    assert list(tmp_path.rglob("headrace/cli/run.*.pyc")) and list(tmp_path.rglob("numpy/__init__.*.pyc"))


def test_a_start_that_fails_is_said(folder):
    with pytest.raises(PeerError, match=r"headrace run failed: .*max_model_len"):
        own_start(Path(folder), ["--max-model-len=-3"])
