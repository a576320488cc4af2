"""mode=int8: products of inputs in bytes against what they are by definition, and engines that run in it."""

from __future__ import annotations

import subprocess
import sys
from os import environ
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import LLM, SamplingParams
from headrace.config import ConfigError, EngineArgs
from headrace.device.cpu import cpu_facts
from headrace.device.cuda import GpuFacts
from headrace.loading.checkpoint import open_checkpoint
from headrace.ops.native.library import LIBRARY, available_paths, library, open_library
from headrace.ops.native.packed import packed_linear, product
from headrace.ops.native.variants import bind_native
from headrace.ops.registry import using
from headrace.resolve import resolve
from native.blocks import GROUPED
from native.test_packed import QUANTISED, bound, matrix, tokens
from tiny import write_tiny_llama

INTEGER_PATHS = [path for path in available_paths() if path != "portable"]


def in_bytes(x: np.ndarray) -> np.ndarray:
    """float64: what is left of inputs [T, K] that are rounded to bytes, 32 of them under one scale."""
    parts = x.reshape(len(x), -1, 32)
    scales = np.abs(parts).max(-1, keepdims=True) / np.float32(127)
    safe = np.where(scales > 0, scales, np.float32(1))
    return (np.rint(parts * (np.float32(1) / safe)).astype(np.float64) * scales).reshape(x.shape)


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("k", [32, 288, 320, 768])
def test_product_and_its_bits_in_any_company(path: str, format: str, k: int) -> None:
    if (k % 256 and format.endswith("_K")) or (k % 64 and format in GROUPED):
        pytest.skip("rows of whole super-blocks or groups only")
    if path == "portable":
        assert product("int8", format, 1) == product("default", format, 1)
        return
    assert {product("int8", format, count) for count in (1, 4, 5, 600)} == {"int8"}
    n = 77
    packed, exact = matrix(format, n, k, mode="int8")
    x, bias = tokens(60, k), tokens(1, n)[0]
    x[:, ::7] *= 30  # outliers
    x[5] *= 1e20
    x[6] *= 1e-20
    x[7] = 0
    x[8, : k // 2] = 0
    x[9] = 3.5  # every input is its block's largest
    whole = packed_linear(x, packed, bias)
    kept, weight = in_bytes(x), np.abs(exact).T.astype(np.float64)
    error = np.abs(whole - (kept @ exact.T.astype(np.float64) + bias))
    # an input halfway between two bytes may go to either
    steps = np.abs(x).reshape(60, -1, 32).max(-1).repeat(32, -1) / 127
    halfway = np.abs(np.abs(x) / np.maximum(steps, 1e-30) % 1 - 0.5)
    step = steps * (halfway < 1e-4)
    allowed = 40 * bound(x, exact) + 1e-6 * np.abs(bias) + step.astype(np.float64) @ weight
    assert (error <= allowed).all()
    assert (step > 0).mean() < 0.01 and not np.array_equal(whole, packed_linear(x, matrix(format, n, k)[0], bias))
    for threads in (1, 3):
        library().set_num_threads(threads)
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 41, 60):
            first = (7 * count) % (61 - count)
            part = packed_linear(x[first : first + count], packed, bias)
            np.testing.assert_array_equal(part, whole[first : first + count])


@pytest.mark.parametrize("format", QUANTISED)
def test_every_path_gives_the_same_bits(path: str, format: str) -> None:
    if path == "portable":
        pytest.skip("it has no products of integers")
    packed, _ = matrix(format, 70, 512, mode="int8")
    x = tokens(9, 512)
    found = packed_linear(x, packed)
    open_library(LIBRARY, INTEGER_PATHS[-1])
    np.testing.assert_array_equal(packed_linear(x, packed), found)


@pytest.mark.parametrize("format", ["Q8_0", "Q6_K", "Q5_1"])
def test_the_largest_sums_fit(path: str, format: str) -> None:
    """Every weight and every input as large as it can be, of either sign."""
    packed, exact = matrix(format, 40, 512, mode="int8")
    signs = np.where(exact[:8] < 0, np.float32(-5), np.float32(5))
    x = np.concatenate([signs, -signs])
    reference = in_bytes(x) @ exact.T.astype(np.float64)
    assert (np.abs(packed_linear(x, packed) - reference) <= 40 * bound(x, exact)).all()


@settings(max_examples=30, deadline=None)
@given(
    format=st.sampled_from(QUANTISED),
    n=st.integers(1, 100),
    blocks=st.integers(1, 4),
    count=st.integers(1, 200),
    seed=st.integers(0, 99),
)
def test_any_shape(format: str, n: int, blocks: int, count: int, seed: int) -> None:
    """On the path of this process: as the first tokens of more, and as floats of the same bytes would give."""
    with using():
        bind_native()
        k = 256 * blocks
        packed, exact = matrix(format, n, k, seed, mode="int8")
        x = np.random.default_rng(seed).integers(-127, 128, (count, k)).astype(np.float32)
        x[:, ::32] = 127  # so that the bytes are the inputs
        found = packed_linear(x, packed)
        assert (np.abs(found - x.astype(np.float64) @ exact.T.astype(np.float64)) <= 40 * bound(x, exact)).all()
        np.testing.assert_array_equal(packed_linear(x[: count // 2 + 1], packed), found[: count // 2 + 1])


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 4}, {"kv_dtype": "int8"}, {"speculate": "ngram"}],
    ids=["plain", "chunks", "int8-kv", "drafts"],
)
def test_an_answer_depends_on_nothing_beside_it(path: str, tmp_path: Path, options: dict[str, object]) -> None:
    """Alone or together, in chunks, with prefix hits and drafts: the same tokens and logprobs."""
    folder = str(write_tiny_llama(tmp_path, hidden=64, inner=96, dim=16))
    prompts = [[5, 9, 3], [7, 8] * 20, [1, 2, 3, 4] * 9, [11]]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=20, ignore_eos=True, logprobs=2)

    def read(output: object) -> list[object]:
        choice = output.outputs[0]  # type: ignore[attr-defined]
        return [(token, entry[token].logprob) for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)]

    plain = {"kv_dtype": options["kv_dtype"]} if "kv_dtype" in options else {}
    with LLM(folder, mode="int8", quantize="q4", **plain) as llm:
        alone = [read(llm.generate([prompt], params)[0]) for prompt in prompts]
    with LLM(folder, mode="int8", quantize="q4", **options) as llm:
        for _ in range(2):  # the second time their prefixes are known
            assert [read(output) for output in llm.generate(prompts, params)] == alone


SCRIPT = """
import sys
from headrace import LLM, SamplingParams
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
for mode in ("default", "int8", "int8"):
    with LLM(sys.argv[1], mode=mode, quantize="q8") as llm:
        print([output.outputs[0].token_ids for output in llm.generate([[5, 9, 3], [7] * 30, [1, 2]], params)])
"""


def test_where_it_is_the_default_mode_that_is_said_once(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, hidden=64, inner=96, dim=16)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        env={**environ, "PYTHONPATH": "src", "HEADRACE_NATIVE_PATH": "portable"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    default, *rounded = done.stdout.splitlines()
    assert rounded == [default] * 2
    assert done.stderr == "headrace: mode=int8 is the same as mode=default on this processor (code path portable)\n"


def test_it_is_for_processors_only(tmp_path: Path) -> None:
    spec = open_checkpoint(write_tiny_llama(tmp_path)).spec
    gpu = GpuFacts("a GPU", (9, 0), 2**34, 2**34, 132)
    with pytest.raises(ConfigError, match="mode=int8 is for CPUs; leave it out or give device=cpu"):
        resolve(EngineArgs(mode="int8"), spec, cpu_facts(), gpu, 10**6)
    assert resolve(EngineArgs(mode="int8"), spec, cpu_facts())[0].mode == "int8"
