"""The doctor's report: what it says of this machine, of others, and of what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.device.cgroup import CgroupLimits
from headrace.device.cuda import GpuFacts
from headrace.doctor import gpu, processor
from headrace.ledger.machine import MachineFacts
from headrace.ops.native.library import (
    EMULATED,
    PATH_STATES,
    Library,
    available,
    available_paths,
    library,
    path_states,
)
from tiny import write_tiny_llama


def test_features_are_read_from_cpuinfo() -> None:
    x86 = "processor: 0\nmodel name : X\nflags\t\t: fpu avx2 fma\nprocessor: 1\nflags : other\n"
    assert processor.features(x86) == {"fpu", "avx2", "fma"}
    assert processor.features("Features : asimd bf16\n") == {"asimd", "bf16"}
    assert processor.features("") == frozenset()


@pytest.mark.parametrize(
    ("quota", "said"), [(None, "none"), (1.5, "1.5 processors' worth"), (64.0, "64 processors' worth")]
)
def test_a_quota_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch, quota: float | None, said: str) -> None:
    monkeypatch.setattr(processor, "cgroup_limits", lambda: CgroupLimits(quota, ()))
    assert dict(processor.processor().findings)["cgroup quota"] == said


@pytest.mark.skipif(not available(), reason="no native kernels")
def test_paths_say_what_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    states = path_states()
    assert [path for path, state in states.items() if state == PATH_STATES[2]] == [
        path for path in available_paths() if path != EMULATED
    ]
    states = {"amx": PATH_STATES[0], "avx512": PATH_STATES[1], "portable": PATH_STATES[2]}
    monkeypatch.setattr(processor, "path_states", lambda: states)
    monkeypatch.setattr(processor, "_cpuinfo", lambda: "flags : avx512f avx512bw avx512dq amx_tile")
    findings = dict(processor.kernels().findings)
    assert findings["  avx512"].endswith("(it lacks avx512vl, avx512_vnni)")
    assert findings["path"].startswith(library().path)
    assert findings["  amx"] == "not compiled (the compiler knew no AMX and fp16: g++ 12 or newer does)"
    monkeypatch.setattr(processor, "path_states", lambda: {"amx": PATH_STATES[1]})
    monkeypatch.setattr(processor, "_cpuinfo", lambda: "flags : " + " ".join(processor.NEEDS["amx"]))
    assert "the system refused this process its tiles" in dict(processor.kernels().findings)["  amx"]
    assert dict(processor.kernels().findings)["  amx"].endswith(f"; {library().path} runs)")
    monkeypatch.setattr(processor, "path_states", lambda: {"amx": PATH_STATES[2]})
    monkeypatch.setattr(processor, "library", lambda: Library("amx", {}))
    monkeypatch.delenv("HEADRACE_NATIVE_PATH", raising=False)
    assert "--mode fast" in dict(processor.kernels().findings)["  amx"]
    monkeypatch.setenv("HEADRACE_NATIVE_PATH", "amx")
    assert dict(processor.kernels().findings)["  amx"] == PATH_STATES[2]


def test_one_core_and_a_forced_path() -> None:
    """In a process of its own: affinity and environment belong to a process."""
    path = "portable" if available() else ""
    script = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from headrace.cli.main import main; raise SystemExit(main(['doctor', '--no-measure', '--json']))"
    )
    environment = {**os.environ, "HEADRACE_NATIVE_PATH": path}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    report = {section["title"]: section["findings"] for section in json.loads(done.stdout)}
    assert report["Processor"]["threads"].startswith("1 ")
    assert ", 1 by this process's affinity" in report["Processor"]["processors"]
    if available():
        assert report["Native CPU kernels"]["path"] == "portable, forced by HEADRACE_NATIVE_PATH"
        assert report["Native CPU kernels"]["mode default"].startswith("float32")


def test_without_kernels_it_says_why() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "doctor", "--no-measure"],
        env={**os.environ, "HEADRACE_NATIVE": "0"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "the numpy references run" in done.stdout
    assert "! switched off by HEADRACE_NATIVE=0" in done.stdout
    assert "native       refused: switched off" in done.stdout


def test_a_gpu_that_cannot_be_used_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "maybe_present", lambda: False)
    assert gpu.gpu().findings == [("used", "no: the system shows no NVIDIA GPU")]
    monkeypatch.setattr(gpu, "maybe_present", lambda: True)
    monkeypatch.setattr(gpu, "unavailable_reason", lambda: "torch is not installed; pip install it")
    assert gpu.gpu().problems == ["torch is not installed; pip install it"]


def test_decoding_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_llama(tmp_path)
    assert main(["doctor", "--json", "-m", str(tmp_path)]) == 0
    report = {section["title"]: section["findings"] for section in json.loads(capsys.readouterr().out)}
    assert "GB/s with" in report["Measured rates"]["reading memory"]
    assert report["Decoding, one request"]["speed"].endswith("steps)")


def test_no_model_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from headrace.doctor.rates import decode

    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    assert decode(None).findings == [("measured", "no: no model is on disk (headrace pull fetches one)")]


def test_a_gpu_is_told_with_its_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = GpuFacts("Some GPU", (9, 0), 100 * 10**9, 140 * 10**9, 132)
    monkeypatch.setattr(gpu, "maybe_present", lambda: True)
    monkeypatch.setattr(gpu, "unavailable_reason", lambda: None)
    monkeypatch.setattr(gpu, "gpu_facts", lambda: facts)
    monkeypatch.setattr(gpu, "gpu_machine_facts", lambda name: MachineFacts(name, 4.4e12, 7.5e14, 1, 0.0))
    found = dict(gpu.gpu().findings)
    assert found["name"] == "Some GPU, compute capability 9.0" and found["memory"] == "100.0 of 140.0 GB free"
    assert found["reading"] == "4.40 TB/s" and found["bfloat16"] == "750 TFLOP/s in a large product"
    assert "reading" not in dict(gpu.gpu(measure=False).findings)

    def damaged() -> None:
        raise ValueError("table.json is no table; remove it")

    for module in ("attention_table.measured_rules", "tile_table.measured_tiles"):
        monkeypatch.setattr(f"headrace.ops.triton.{module}", damaged)
    section = gpu.gpu(measure=True)
    assert section.problems == ["table.json is no table; remove it"] * 2
    assert "reading" in dict(section.findings), "the rest is told all the same"
