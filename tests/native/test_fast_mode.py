"""mode=fast: which arithmetic a step gets, what a user is told, and where it is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.attention.native import NativeAttention
from headrace.config import ConfigError, EngineArgs
from headrace.device.cpu import cpu_facts
from headrace.device.cuda import GpuFacts
from headrace.layers.weights import WeightSource
from headrace.loading.checkpoint import open_checkpoint
from headrace.models.registry import build_model
from headrace.ops.native.library import LIBRARY, available_paths, open_library
from headrace.quant.packed import Packed
from headrace.resolve import resolve
from models.harness import Stepper
from native.test_native_model import VOCAB, write_model
from tiny import write_tiny_llama


def test_a_step_is_one_of_two_arithmetics(path: str, tmp_path: Path) -> None:
    """Up to 4 tokens what the AVX-512 path's default mode gives, more what this path's does: the very bits."""
    if not path.startswith("amx"):
        pytest.skip("a path whose fast mode is its default mode")
    checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", {"": "Q4_1", "token_embd": "Q8_0"}, tied=True))
    ids = np.random.default_rng(1).integers(0, VOCAB, 40)

    def logits(path: str, mode: str, count: int) -> np.ndarray:
        open_library(LIBRARY, path)
        stepper = Stepper(build_model(checkpoint.spec, WeightSource(checkpoint), Packed(mode)), 1, 64)
        stepper.backend = NativeAttention(16)
        return stepper.step({0: ids[:count]})[0]

    np.testing.assert_array_equal(logits(path, "fast", 4), logits("avx512", "default", 4))
    for count in (5, 40):
        np.testing.assert_array_equal(logits(path, "fast", count), logits(path, "default", count))
    assert not np.array_equal(logits(path, "default", 4), logits("avx512", "default", 4))


SCRIPT = """
import sys
from headrace import LLM, SamplingParams
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
for mode in sys.argv[2:]:
    with LLM(sys.argv[1], mode=mode, quantize="q8") as llm:
        print([output.outputs[0].token_ids for output in llm.generate([[5, 9, 3], [7] * 30, [1, 2]], params)])
"""


@pytest.mark.parametrize("path", ["portable", "avx512", "amx", "amx-emulated"])
def test_an_engine_runs_in_it_and_says_once_where_it_is_the_default_mode(tmp_path: Path, path: str) -> None:
    if path not in available_paths():
        pytest.skip("not on this processor")
    folder = write_tiny_llama(tmp_path, hidden=64, inner=96, dim=16)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), "default", "fast", "fast"],
        env={**os.environ, "PYTHONPATH": "src", "HEADRACE_NATIVE_PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    default, *fast = done.stdout.splitlines()
    said = f"headrace: mode=fast is the same as mode=default on this processor (code path {path})\n"
    assert fast[0] == fast[1]
    if path.startswith("amx"):
        assert not done.stderr
    else:
        assert done.stderr == said and fast[0] == default


def test_it_is_for_processors_only(tmp_path: Path) -> None:
    spec = open_checkpoint(write_tiny_llama(tmp_path)).spec
    gpu = GpuFacts("a GPU", (9, 0), 2**34, 2**34, 132)
    with pytest.raises(ConfigError, match="mode=fast is for CPUs; leave it out or give device=cpu"):
        resolve(EngineArgs(mode="fast"), spec, cpu_facts(), gpu, 10**6)
    config, _, choices = resolve(EngineArgs(mode="fast"), spec, cpu_facts())
    assert config.mode == "fast"
    assert [choice.reason for choice in choices if choice.option == "mode"] == ["as asked"]
