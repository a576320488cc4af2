"""The server under faults, in full: what tests/server/test_faults_short.py does briefly.

    .venv/bin/python bench/faults.py [--json bench/results/cpu/faults.json] [--case NAME ...]

Each case ends with an AssertionError if anything is left over, has grown, or was answered wrong. The model is a tiny
random one with its real engine; 100,000 short requests go to an engine that answers at once, and to the real one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "server")]

import fault_cases  # noqa: E402
from harness import Server, serve_command  # noqa: E402

from headrace.bench.results import write_results  # noqa: E402
from tiny import write_tiny_llama  # noqa: E402


def cases(model: Path, folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    named = ("--served-model-name", "tiny")

    def dropped() -> dict[str, Any]:
        with Server(serve_command(model, *named, "--max-num-seqs", "8")) as server:
            return fault_cases.dropped(server, 1000)

    def slow_loris() -> dict[str, Any]:
        with Server(serve_command(model, *named, "--body-timeout", "5")) as server:
            return fault_cases.slow_loris(server, 600, 5.0)

    return {
        "1,000 streams dropped": dropped,
        "slow loris": slow_loris,
        "kill -9 of the engine under load": lambda: fault_cases.engine_killed(model, 5, 16),
        "full disk for log and ledger": lambda: fault_cases.full_disk(model, folder, 3000, 200_000),
        "clock steps": lambda: fault_cases.clock_steps(model, 300),
        "100,000 short requests": lambda: fault_cases.short_requests(model, 100_000),
        # the ledger keeps the latest 4,096 steps and bills, and the prefix cache fills, before it is flat
        "100,000 short requests, real engine": lambda: fault_cases.short_requests(
            model, 100_000, real=True, settled_after=50_000
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", action="append", help="only this one; may be repeated")
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case, run in cases(write_tiny_llama(folder / "tiny"), folder).items():
            if arguments.case and case not in arguments.case:
                continue
            started = time.monotonic()
            result = run()
            found[case] = {"seconds": round(time.monotonic() - started, 1), **result}
            print(case, {key: value for key, value in found[case].items() if key != "memory"}, flush=True)
    if arguments.json:
        # no rows: nothing here is a speed
        write_results(arguments.json, "faults", [], "uvicorn", "pyzmq", "msgspec", more={"cases": found})


if __name__ == "__main__":
    main()
