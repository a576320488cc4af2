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
import json, os, resource, subprocess, sys
cores, limit, *command = sys.argv[1:]
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])
if int(limit):
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
child = subprocess.Popen(command, stdout=subprocess.PIPE)
answer = child.stdout.read().decode()
_, status, usage = os.wait4(child.pid, 0)
print(json.dumps([answer, os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024]))
"""


def run(cores: int, limit: int = 0) -> tuple[str, int]:
    """(answer, peak resident memory in bytes: file pages included) of a process of its own on `cores` cores.

    `limit`: bytes of memory that is not a file's, whether touched or not (RLIMIT_DATA; 0: none). Beyond it the kernel
    refuses more, so this is stricter than a container's limit, which counts touched memory and takes back file pages.
    """
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(cores), str(limit), *COMMAND], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answer, code, peak = json.loads(done.stdout)
    assert code == 0, done.stderr
    return answer, peak


def settled(cores: int, limit: int = 0) -> tuple[str, int]:
    """As `run`, once the machine's rates are known: whoever measures them, once, takes 256 MB and more for it."""
    run(cores)
    return run(cores, limit)


def test_one_core_gives_the_same_answer_in_little_memory() -> None:
    answer, peak = settled(cores=1)
    everything, peak_of_all = settled(cores=len(os.sched_getaffinity(0)))
    assert answer.strip() and answer == everything
    assert max(peak, peak_of_all) < 250e6


def test_512_megabytes_are_enough() -> None:
    """Also that the limit is one: with less than the weights take there is a message, and no answer."""
    answer, peak = settled(cores=1, limit=512_000_000)
    assert answer.strip() and answer == run(cores=1)[0]
    assert peak < 512e6
    with pytest.raises(AssertionError, match="memory"):
        run(cores=1, limit=90_000_000)
