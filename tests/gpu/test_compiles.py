"""Every kernel is compiled for a Hopper GPU, here where there is none: see hopper_compiler.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny import write_tiny_llama, write_tiny_mixtral

SCRIPT = Path(__file__).with_name("hopper_compiler.py")


def compile_all(model, *options):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(model), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "dim", [pytest.param(64, marks=pytest.mark.slow), 128, pytest.param(256, marks=pytest.mark.slow)]
)
def test_all_kernels_of_an_engine(tmp_path, dim):
    said = compile_all(write_tiny_llama(tmp_path, hidden=256, inner=512, dim=dim))
    attention = ("plan_slots", "list_units", "decode", "prefill")
    for kernel in ("linear", "gated_linear", *attention, "count", "chunk_best", "commit"):
        assert f"_{kernel} " in said, f"_{kernel} was not compiled"


@pytest.mark.slow
def test_products_whose_steps_are_shorter_than_a_line_of_the_cache(tmp_path):
    assert "_linear " in compile_all(write_tiny_llama(tmp_path, hidden=96, inner=320, dim=64))


@pytest.mark.slow
def test_kernels_of_a_model_with_a_window(tmp_path):
    assert "_decode " in compile_all(write_tiny_llama(tmp_path, window=20))


def test_kernels_of_experts(tmp_path):
    said = compile_all(write_tiny_mixtral(tmp_path, hidden=256, inner=512, dim=64))
    for kernel in ("route", "expert_gated", "expert_down", "combine"):
        assert f"_{kernel} " in said, f"_{kernel} was not compiled"


def test_kernels_of_invariant_engines(tmp_path):
    model = write_tiny_llama(tmp_path, hidden=256, inner=512, dim=64)
    assert "_linear " in compile_all(model, "invariant=True", "speculate=ngram")


def test_kernels_of_engines_that_verify_drafts(tmp_path):
    said = compile_all(write_tiny_llama(tmp_path, hidden=256, inner=512, dim=64), "speculate=ngram")
    for kernel in ("spans", "merge"):
        assert f"_{kernel} " in said, f"_{kernel} was not compiled"


def test_kernels_of_token_trees(tmp_path):
    model = write_tiny_llama(tmp_path, hidden=256, inner=512, dim=64)
    said = compile_all(model, "speculate=ngram", "draft_tree=8")
    for kernel in ("spans", "commit_trees", "move"):
        assert f"_{kernel} " in said, f"_{kernel} was not compiled"
