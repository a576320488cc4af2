"""A server whose engine is a script: run as a program it takes the options of `headrace serve`.

The first byte of a prompt says what happens to it: E: an error at its 5th token; D: the engine raises at its 5th token;
H: the engine hangs; otherwise tests/fakes.py says which tokens come. A step takes $FAKE_STEP_SECONDS.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace

from fakes import VOCAB, FakeRunner
from headrace.config import EngineArgs
from headrace.core.kv_layout import KVGroup, KVLayout
from headrace.core.kv_manager import KVCacheManager
from headrace.core.loop import EngineCore
from headrace.core.pacing import NoPacing
from headrace.core.plan import StepPlan, StepResult
from headrace.core.plan_builder import SchedulerLimits
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.frontend.ipc import Add, EngineInfo
from headrace.ledger.book import NullLedger

BLOCK, NUM_BLOCKS, MAX_LEN = 16, 1024, 4096


class ScriptedRunner(FakeRunner):
    def __init__(self) -> None:
        super().__init__(BLOCK)
        self.seconds = float(os.environ.get("FAKE_STEP_SECONDS", "0"))
        self.prompts: dict[int, tuple[int, int]] = {}  # row -> (first token of its prompt, length of it)

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        time.sleep(self.seconds)
        for admit in plan.admits:
            self.prompts[admit.row] = admit.token_ids[0], admit.prompt_len
        result = super().execute(plan).result()
        self.plans.clear()  # kept for tests that look at them
        errors = {}
        for index, row in enumerate(plan.rows.tolist()):
            first, length = self.prompts[row]
            fifth = len(self.rows[row]["tokens"]) - length >= 5
            if first == LETTERS["E"] and fifth:
                errors[index] = "the scripted error"
            elif first == LETTERS["D"] and fifth:
                raise RuntimeError("the scripted death")
            elif first == LETTERS["H"]:
                time.sleep(3600)
        future: Future[StepResult] = Future()
        future.set_result(replace(result, errors=errors))
        return future


LETTERS = {letter: ord(letter) - ord("!") for letter in "EDH"}  # ids of tiny.py's byte-level alphabet


class Backlog(NoPacing):
    """Predicts $FAKE_BACKLOG seconds, whatever waits."""

    def backlog(self, prompts: Iterable[Request]) -> float:
        return float(os.environ.get("FAKE_BACKLOG", "0"))


class FakeEngine:
    def __init__(self, args: EngineArgs):
        rows = args.max_num_seqs or 4
        self.layout = KVLayout((KVGroup((0,), 1, 8, None),), BLOCK, NUM_BLOCKS, max_span=64)
        limits = SchedulerLimits(rows, 64, MAX_LEN)
        self.core = EngineCore(Scheduler(limits, KVCacheManager(self.layout), pacing=Backlog()), ScriptedRunner())
        self.ledger = NullLedger()
        self.rows = rows

    def prepare(self, add: Add) -> None:
        return None

    def requests(self, add: Add) -> list[Request]:
        count, name = add.params.num_choices, add.id
        most = add.params.max_tokens or MAX_LEN
        return [
            Request(
                name if count == 1 else f"{name}/{i}",
                add.token_ids,
                add.params,
                max_new_tokens=most,
                choice=i,
                batch=add.batch,
                arrival=add.arrival,
            )
            for i in range(count)
        ]

    def bill(self, request_id: str) -> None:
        return None

    def info(self) -> EngineInfo:
        return EngineInfo(MAX_LEN, MAX_LEN - 1, self.rows, NUM_BLOCKS, BLOCK, 0.0, [])

    def close(self) -> None:
        pass


def make(args: EngineArgs) -> FakeEngine:
    failure = os.environ.get("FAKE_FAILS_TO_LOAD")
    if failure == "memory":
        raise MemoryError("Unable to allocate 1 TiB")
    if failure:
        raise RuntimeError("the scripted load failure")
    return FakeEngine(args)


def main() -> int:
    from headrace.cli.options import engine_args
    from headrace.cli.serve import add_commands, server_args
    from headrace.server.run import serve
    from headrace.server.service import Service

    assert VOCAB < 256
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    arguments = parser.parse_args(["serve", *sys.argv[1:]])
    return serve(Service(server_args(arguments), engine_args(arguments), factory="fake_engine:make"))


if __name__ == "__main__":
    sys.exit(main())
