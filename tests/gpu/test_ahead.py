"""Kernels compiled ahead: what a rehearsal foresees is what an engine calls, and nothing is compiled twice."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue

import pytest

from headrace.layers.weights import WeightSource
from headrace.models.spec import ModelSpec, MoESpec
from headrace.ops.triton.ahead import Ahead
from headrace.ops.triton.runtime import RUNTIME
from headrace.worker.rehearsal import NoWeights, shortened
from tiny import write_tiny_llama, write_tiny_mixtral

SCRIPT = Path(__file__).with_name("ahead_offline.py")


def start_offline(model, cache, *options):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(model), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
def test_an_engine_calls_what_was_foreseen(tmp_path):
    model, cache = write_tiny_llama(tmp_path / "tiny", hidden=256, inner=512, dim=64), tmp_path / "cache"
    found, _ = start_offline(model, cache)
    counts = found["ahead"]
    assert counts["compiled"] == counts["noted"] == counts["launchers"] > 40 and not counts["failed"]
    assert found["most"] == 1, "a variant was compiled twice"
    assert found["unforeseen"] == []
    again, _ = start_offline(model, cache)
    assert again == {"ahead": None, "most": 0, "unforeseen": []}, "the next start finds all there"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["cuda_graphs=False"],
        ["invariant=True"],
        ["speculate=ngram"],
        ["speculate=ngram", "invariant=True"],
        ["speculate=ngram", "draft_tree=8"],
        ["dtype=float16"],
    ],
    ids=["without graphs", "invariant", "drafts", "drafts of invariant ones", "trees", "float16"],
)
def test_so_does_one_with_options(tmp_path, options):
    model = write_tiny_llama(tmp_path / "tiny", hidden=256, inner=512, dim=64, window=20)
    found, said = start_offline(model, tmp_path / "cache", *options)
    assert found["ahead"] is not None, said
    assert found["most"] == 1 and found["unforeseen"] == []


@pytest.mark.slow
def test_so_does_one_with_experts(tmp_path):
    model = write_tiny_mixtral(tmp_path / "tiny", hidden=256, inner=512, dim=64)
    found, said = start_offline(model, tmp_path / "cache")
    assert found["ahead"] is not None, said
    assert found["most"] == 1 and found["unforeseen"] == []


def test_a_rehearsal_reads_no_weights_and_takes_little_memory(tmp_path):
    """An 8B shape's tensors would take 16 GB; what it rehearses with are shapes, of two of 32 layers."""
    spec = ModelSpec("llama", 128256, 4096, 14336, 32, 32, 8, 128, 1e-5, 8192)

    class Files:
        def names(self):
            return ["model.norm.weight", *(f"model.layers.{n}.mlp.up_proj.weight" for n in range(32))]

        def shape(self, name):
            return (14336, 4096)

        def read(self, name):
            raise AssertionError("weights were read")

    short = shortened(spec)
    weights = NoWeights(Files(), short.num_layers)
    assert short.num_layers == 2 and len(list(weights.names())) == 3
    assert weights.read("model.norm.weight").strides == (0, 0)
    assert "model.layers.2.mlp.up_proj.weight" not in WeightSource(weights)


def test_layers_of_every_kind_are_kept():
    windows = (None, 512, None, 512, None, 512)
    spec = ModelSpec("qwen3_moe", 100, 64, 64, 6, 4, 4, 16, 1e-5, 512, windows=windows)
    assert shortened(spec).num_layers == 2
    with_experts = MoESpec(4, 2, 64, dense_layers=frozenset({0, 1, 2}))
    spec = ModelSpec("qwen3_moe", 100, 64, 64, 6, 4, 4, 16, 1e-5, 512, windows=windows, moe=with_experts)
    short = shortened(spec)
    assert short.num_layers == 5 and short.windows == windows[:5]


class Gate:
    """A compiler that takes as long as a test wants."""

    def __init__(self):
        self.began, self.open, self.done = [], threading.Event(), []
        self.begun = threading.Event()

    def __call__(self, job):
        self.began.append(job.kernel)
        self.begun.set()
        assert self.open.wait(20)
        if job.constants.get("fails"):
            raise RuntimeError("no such kernel")
        self.done.append(job.kernel)


@pytest.fixture
def jobs():
    """(start, gate, after): `start(names, threads)` gives an Ahead that has begun with them."""
    gate, started, after = Gate(), [], Queue()

    def start(names, num_threads=1, **constants):
        ahead = Ahead(num_threads, gate)
        with ahead.record():
            assert RUNTIME.launches is ahead
            for name in names:
                ahead.note(name, ("key",), (), constants)
        ahead.start(lambda: after.put(1))
        started.append(ahead)
        return ahead

    yield start, gate, after
    gate.open.set()
    for ahead in started:
        ahead.stop()
    assert RUNTIME.launches is None


def test_a_call_waits_for_what_has_begun_and_takes_what_has_not(jobs):
    start, gate, after = jobs
    ahead = start(["a", "b", "b"])
    assert ahead.counts.noted == 2
    assert gate.begun.wait(20) and gate.began == ["a"]
    ahead.settle("b", ("key",))  # the caller compiles it
    ahead.settle("unknown", ("key",))
    waiting = threading.Thread(target=ahead.settle, args=("a", ("key",)))
    waiting.start()
    gate.open.set()
    waiting.join(20)
    assert ahead.wait(20) and gate.done == ["a"], "b was compiled although a call had taken it"
    assert after.get(timeout=20) == 1 and after.empty()


def test_what_fails_is_left_to_the_call(jobs):
    start, gate, after = jobs
    gate.open.set()
    ahead = start(["a", "b"], 2, fails=True)
    assert ahead.wait(20) and ahead.counts.failed == 2 and after.empty()
    ahead.settle("a", ("key",))  # does not wait, does not raise


def test_nothing_begins_while_steps_run(jobs):
    start, gate, _ = jobs
    ahead = start(["a", "b"])
    assert gate.begun.wait(20)
    ahead.hold()
    gate.open.set()
    assert not ahead.wait(0.5) and gate.began == ["a"] and ahead.num_left == 1
    ahead.go_on()
    assert ahead.wait(20) and gate.began == ["a", "b"]
