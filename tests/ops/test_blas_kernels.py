"""Invariance on the kernels of other processors, which OpenBLAS runs when told to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import numpy as np
from headrace import ops
rng = np.random.default_rng(0)
for out_size, in_size in [(8, 8), (33, 24), (100, 48), (160, 64), (576, 576), (576, 1536)]:
    x = rng.standard_normal((19, in_size), np.float32)
    weight = rng.standard_normal((out_size, in_size), np.float32)
    whole = ops.linear(x, weight)
    for start in range(19):
        for count in (1, 5, 16, 17):
            assert np.array_equal(ops.linear(x[start : start + count], weight), whole[start : start + count])
"""


@pytest.mark.slow
@pytest.mark.parametrize("core", ["Nehalem", "Sandybridge", "Haswell", "Zen", "SkylakeX", "Cooperlake"])
def test_linear_is_invariant_on(core: str) -> None:
    environment = {**os.environ, "OPENBLAS_CORETYPE": core, "PYTHONPATH": "src"}
    result = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    if result.returncode < 0:
        pytest.skip(f"this machine cannot run {core} kernels")
    assert result.returncode == 0, result.stderr
