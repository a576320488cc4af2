"""The faults of fault_cases.py, short; bench/faults.py does them in full."""

from __future__ import annotations

import fault_cases
import pytest
from harness import Server, serve_command

pytestmark = pytest.mark.slow


def test_dropped(server):
    assert fault_cases.dropped(server, 200)["answers checked meanwhile"] > 0


def test_slow_loris(tiny_model):
    options = ("--served-model-name", "tiny", "--body-timeout", "1")
    with Server(serve_command(tiny_model, *options)) as server:
        assert sum(fault_cases.slow_loris(server, 60, 1.0)["closed"].values()) == 60


def test_engine_killed(tiny_model):
    assert fault_cases.engine_killed(tiny_model, 2, 6)["told that the engine died"] >= 2


def test_full_disk(tiny_model, tmp_path):
    fault_cases.full_disk(tiny_model, tmp_path, 400)


def test_clock_steps(tiny_model):
    fault_cases.clock_steps(tiny_model, 12)


def test_short_requests(tiny_model):
    fault_cases.short_requests(tiny_model, 4000)
