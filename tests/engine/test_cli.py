"""The command line: answers, errors in one line with exit code 2, help at once."""

import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import main as cli
from headrace.cli.main import main
from tiny import write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_llama(tmp_path_factory.mktemp("tiny")))


RUN = ["--temperature", "0", "--max-tokens", "8", "--ignore-eos"]


def test_run_prints_the_answer_and_the_speed(folder, capsys):
    assert main(["run", "-m", folder, "hello", *RUN]) == 0
    out, err = capsys.readouterr()
    assert out.strip() and "tokens/s" in err and "bound by" in err
    assert main(["run", "-m", folder, "hello", "--quiet", *RUN]) == 0
    assert capsys.readouterr() == (out, "")


def test_run_explains_and_exports_the_ledger(folder, capsys, tmp_path):
    path = tmp_path / "steps.jsonl"
    assert main(["run", "-m", folder, "hello", "--explain", "--ledger-jsonl", str(path), *RUN]) == 0
    err = capsys.readouterr().err
    assert "max_model_len = 512" in err and "steps" in err and "request r0: " in err and "faster" in err
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    records = [line for line in lines if line["kind"] == "step"]
    assert len(records) == 8 and {record["bound"] for record in records} <= {"host", "bandwidth", "compute"}
    assert [line["output_tokens"] for line in lines if line["kind"] == "request"] == [8]
    for options in ([], ["--request", "r0"], ["--step", "3"], ["--misses"], ["--preemptions"]):
        assert main(["explain", str(path), *options]) == 0
    assert "nobody was preempted" in capsys.readouterr().out


def test_a_start_collects_no_garbage_and_then_as_usual():
    usual = gc.get_threshold()
    try:
        cli._start_quickly("run")
        cli._start_quickly("run")  # a second command in one process
        assert gc.get_threshold()[0] == cli.START_OBJECTS and gc.callbacks.count(cli._usual_collections) == 1
        gc.collect()
        assert gc.get_threshold()[0] == cli.COLLECT_EVERY
    finally:
        gc.set_threshold(*usual)


@pytest.mark.parametrize("raw", [True, False])
def test_a_raw_prompt_needs_no_chat_template(folder, raw):
    """jinja2, and compiling the template, are left out of its start."""
    argv = ["run", "-m", folder, "hello", "--quiet", *RUN, *["--raw"][:raw]]
    program = f"import sys; from headrace.cli.main import main; main({argv!r}); print('jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == str(not raw)


def test_several_choices(folder, capsys):
    assert main(["run", "-m", folder, "hi", "--n", "2", "--seed", "1", "--max-tokens", "4", "--temperature", "1"]) == 0
    assert "--- choice 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["run", "-m", "/nowhere/model.gguf", "hi"], "/nowhere/model.gguf"),
        (["run", "-m", "no-such-model", "hi"], "no-such-model"),
        (["run", "-m", "{folder}", "hi", "--temperature", "-1"], "temperature"),
        (["run", "-m", "{folder}", "hi", "--top-p", "0"], "top_p"),
        (["run", "-m", "{folder}", "hi", "--kv-cache", "lots"], "kv_cache"),
        (["run", "-m", "{folder}", "hi", "--max-model-len", "100000"], "512 positions"),
        (["run", "-m", "{folder}", "x" * 600], "600|6\\d\\d"),
        (["run", "-m", "{folder}", "hi", "--attention-backend", "magic"], "magic"),
        (["bench", "latency", "-m", "{folder}", "--runs", "0"], "--runs"),
        (["run", "-m", "{folder}", "hi", "--no-ledger", "--ledger-jsonl", "/tmp/x"], "leave out --no-ledger"),
        (["pull", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folder, capsys, argv, words):
    assert main([word.format(folder=folder) for word in argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("headrace: error: ") and err.count("\n") == 1

    assert re.search(words, err), err


@pytest.mark.parametrize("argv", [["run", "--nonsense"], ["fly"], [], ["run", "-m"], ["bench"]])
def test_bad_usage_is_exit_code_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2


@pytest.mark.parametrize("damage", ["empty", "truncated", "garbage", "zeros"])
def test_damaged_files_are_one_line(tmp_path, default_model_path, capsys, damage):
    path = tmp_path / "model.gguf"
    data = default_model_path.read_bytes()[: 1 << 20]
    path.write_bytes({"empty": b"", "truncated": data, "garbage": b"GGUF" + bytes(range(256)) * 40,
                      "zeros": bytes(4096)}[damage])  # fmt: skip
    assert main(["run", "-m", str(path), "hi"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("headrace: error: ") and "model.gguf" in err and err.count("\n") == 1


def test_missing_weights_are_named(tmp_path, capsys):
    from safetensors.numpy import load_file, save_file

    folder = write_tiny_llama(tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"][:-1]
    tensors["surprise"] = tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert main(["run", "-m", str(folder), "hi"]) == 2
    err = capsys.readouterr().err
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight", "surprise"):
        assert name in err


def test_bench_writes_a_results_file(folder, tmp_path, capsys):
    path = tmp_path / "latency.json"
    argv = ["--prompt-len", "8", "--output-len", "4", "--runs", "1", "--json", str(path)]
    assert main(["bench", "latency", "-m", folder, "--batch-size", "2", *argv]) == 0
    value = json.loads(path.read_text())
    assert {"name", "date", "commit", "environment", "rows"} <= set(value)
    assert [row["unit"] for row in value["rows"]] == ["ms", "tok/s"]
    assert main(["bench", "throughput", "-m", folder, "--num-requests", "3", *argv]) == 0
    capsys.readouterr()
    assert main(["bench", "latency", "-m", folder, "--prompt-len", "8", "--output-len", "1", "--runs", "1"]) == 0
    assert "tok/s" not in capsys.readouterr().out


def test_chat_commands(folder, capsys):
    from headrace import LLM, SamplingParams
    from headrace.cli.chat import Conversation

    with LLM(folder) as llm:
        lines = iter(
            ["hi", "/set temperature 0", "/retry", "/set nonsense 1", "/set top_p 7", "/set __class__ 3",
             "/set greedy 1", "/set temperature [", "/save", "/system be brief", "more",
             "/explain", "/help", "/what", "/quit", "never"]
        )  # fmt: skip
        conversation = Conversation(llm, SamplingParams(max_tokens=5, seed=1), None)
        assert conversation.loop(lambda: next(lines)) == 0
        assert next(lines) == "never"
        assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    err = capsys.readouterr().err
    assert "nonsense" in err and "top_p must be" in err and "unknown command /what" in err
    assert "'__class__' is none" in err and "'greedy' is none" in err and "give a file name" in err


def test_ctrl_c_at_the_prompt_cancels_the_line_and_twice_leaves(folder, capsys, monkeypatch):
    from headrace import LLM, SamplingParams
    from headrace.cli.chat import Conversation

    with LLM(folder) as llm:
        steps = iter([KeyboardInterrupt, "hi", KeyboardInterrupt, KeyboardInterrupt, "never"])

        def read():
            step = next(steps)
            if step is KeyboardInterrupt:
                raise KeyboardInterrupt
            return step

        conversation = Conversation(llm, SamplingParams(max_tokens=3, seed=1), None)
        assert conversation.loop(read) == 0 and next(steps) == "never"
        assert len(conversation.messages) == 2
        assert capsys.readouterr().err.count("Ctrl-C again") == 2

        def gone(self, text):
            raise BrokenPipeError

        monkeypatch.setattr(Conversation, "_answer", gone)
        with pytest.raises(BrokenPipeError):
            conversation.loop(lambda: "hi")


def test_the_rate_of_what_was_not_streamed(folder, capsys):
    assert main(["run", "-m", folder, "hi", "--n", "2", "--best-of", "4", "--max-tokens", "4", "--ignore-eos"]) == 0
    err = capsys.readouterr().err
    assert "8 tokens in " in err and "tokens/s over all" in err


def test_failures_outside_the_commands_are_one_line(capsys, monkeypatch):
    from headrace.cli import main as module

    for error, code, words in (
        (KeyboardInterrupt(), 130, "interrupted"),
        (ImportError("libx.so: failed to map segment"), 2, "cannot be loaded: libx.so"),
        (RuntimeError("can't start new thread"), 2, "new thread"),
        (MemoryError(), 2, "MemoryError"),
        (BrokenPipeError(), 141, ""),
    ):

        def fail(command, error=error):
            raise error

        monkeypatch.setattr(module, "_parser", fail)
        assert main(["models"]) == code
        err = capsys.readouterr().err.strip()
        assert words in err and err.count("\n") == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_ledger_that_cannot_be_written_is_told(folder, capsys):
    assert main(["run", "-m", folder, "hi", "--ledger-jsonl", "/dev/full", *RUN]) == 0
    assert "/dev/full ends early: OSError" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="shells")
@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("run <&-", 2, "give a prompt"),
        ("chat <&-", 2, "input is closed"),
        ("models >&-", 2, "output is closed"),
        ("models >/dev/full", 2, "No space left"),
        ("--help | true; exit ${PIPESTATUS[0]}", (0, 141), ""),
        ("models --supported | true; exit ${PIPESTATUS[0]}", (0, 141), ""),
    ],
)
def test_closed_streams(command, code, words, tmp_path):
    line = f'"{sys.executable}" -m headrace {command}'
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env={**os.environ, "HEADRACE_HOME": str(tmp_path)}
    )
    assert done.returncode in (code if isinstance(code, tuple) else (code,)), done.stderr
    assert words in done.stderr and done.stderr.count("\n") == bool(words), done.stderr
