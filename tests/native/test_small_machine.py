"""The default model on a small machine: one core, little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from headrace.loading.store import list_models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux"),
    pytest.mark.skipif(
        not any(model.name == "smollm2-135m" for model in list_models()),
        reason="the default model is not on disk (headrace pull)",
    ),
]
COMMAND = [sys.executable, "-m", "headrace", "run", "--quiet", "--temperature", "0", "--max-tokens", "40", "The sky is"]
# A process counts the memory of the one it was forked from: this small one stands between the tests and the engine.
LAUNCHER = """
import json, os, subprocess, sys
cores, *command = sys.argv[1:]
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])
child = subprocess.Popen(command, stdout=subprocess.PIPE)
answer = child.stdout.read().decode()
_, status, usage = os.wait4(child.pid, 0)
print(json.dumps([answer, os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024]))
"""


def run(cores: int) -> tuple[str, int]:
    """(answer, peak resident memory in bytes: file pages included) of a process of its own on `cores` cores."""
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(cores), *COMMAND], capture_output=True, text=True, check=True
    )
    answer, code, peak = json.loads(done.stdout)
    assert code == 0
    return answer, peak


def test_one_core_gives_the_same_answer_in_little_memory() -> None:
    """A limit on address space would prove nothing, since the cache reserves what it may never touch; resident memory
    is what a container counts."""
    answer, peak = run(cores=1)
    everything, peak_of_all = run(cores=len(os.sched_getaffinity(0)))
    assert answer.strip() and answer == everything
    assert max(peak, peak_of_all) < 250e6
