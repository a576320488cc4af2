"""Every kernel is compiled for a Hopper GPU, here where there is none: see hopper_compiler.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny import write_tiny_llama

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


@pytest.mark.parametrize("dim", [64, 128])
def test_all_kernels_of_an_engine(tmp_path, dim):
    said = compile_all(write_tiny_llama(tmp_path, hidden=256, inner=512, dim=dim))
    for kernel in ("_linear", "_gated_linear", "_decode", "_prefill", "_plan_items", "_count", "_chunk_best", "_commit"):
        assert f"{kernel} " in said, f"{kernel} was not compiled"


@pytest.mark.slow
def test_kernels_of_a_model_with_a_window(tmp_path):
    assert "_decode " in compile_all(write_tiny_llama(tmp_path, window=20))
