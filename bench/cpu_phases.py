"""Where a step's time goes on a CPU: each kind of native call, and what is left to Python, numpy and the sampler.

    python bench/cpu_phases.py [--model smollm2-135m] [--paths avx512 amx] [--threads 2] [--batch 8 32] [--json FILE]

Steps for each code path in turns and in a process of its own: some requests that decode behind prompts of 128
tokens, and a prefill of 1,024 tokens. Steps are run call by call, which they are not otherwise (they are replayed as
one call): `replayed` is such a step's time as ever. The least of `--runs` runs counts: what else a machine does only
adds.
`--model dummy`: random weights of SmolLM2-135M's shape, 4 bits a weight and an 8-bit head.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from headrace import LLM
from headrace.bench.measure import random_prompts, run_batch
from headrace.bench.results import write_results
from headrace.bench.shapes import write_shape
from headrace.ops.native.library import available_paths, library
from headrace.sampling.params import SamplingParams
from headrace.worker import recorded

CONTEXT, STEPS, PREFILL = 128, 24, 1024


class Phases:
    """An engine whose native calls are timed, by kind."""

    def __init__(self, model: str, threads: int, most: int):
        options: dict[str, Any] = {"device": "cpu", "num_threads": threads, "max_num_seqs": most}
        with tempfile.TemporaryDirectory() as folder:
            if model == "dummy":
                model, options["quantize"] = write_shape("smollm2-135m", Path(folder)), "q4"
            self.llm = LLM(model, max_model_len=2048, **options)
        self.vocab_size = self.llm.engine.spec.vocab_size
        self.spent: dict[str, float] = {}
        self._functions = library().functions
        self._real = dict(self._functions)

    def _timed(self, name: str) -> Callable[..., Any]:
        function = self._real[name]

        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            kind = name
            if name == "linear":  # arguments 2 and 8: inputs, and outputs where rows lie one behind the other
                kind = "head" if arguments[8] == self.vocab_size else f"linear {arguments[2]} -> {arguments[8]}"
            self.spent[kind] = self.spent.get(kind, 0.0) + time.perf_counter() - started
            return result

        return call

    def _time_calls(self, wanted: bool) -> None:
        for name in self._real:
            self._functions[name] = self._timed(name) if wanted else self._real[name]
        recorded.MAX_TOKENS = 0 if wanted else 256
        self.spent.clear()

    def _decode(self, batch: int, timed: bool) -> float:
        """Seconds of a step of `batch` requests."""
        engine, warm = self.llm.engine, 4
        params = SamplingParams(temperature=0.0, max_tokens=STEPS + warm + 4, ignore_eos=True)
        prompts = random_prompts(self.vocab_size, batch, CONTEXT)
        self._time_calls(timed)
        outputs = [engine.submit(prompt, params, cache_salt=str(time.time())) for prompt in prompts]
        while not all(output.outputs[0].token_ids for output in outputs):
            engine.step()
        for _ in range(warm):
            engine.step()
        self.spent.clear()
        started = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        seconds, spent = (time.perf_counter() - started) / STEPS, dict(self.spent)
        while not all(output.finished for output in outputs):
            engine.step()
        self._time_calls(False)
        self.spent = {kind: total / STEPS for kind, total in spent.items()}
        return seconds

    def _prefill(self, timed: bool) -> float:
        self._time_calls(timed)
        seconds = run_batch(self.llm, random_prompts(self.vocab_size, 1, PREFILL), 1).first_token
        spent = dict(self.spent)
        self._time_calls(False)
        self.spent = spent
        return seconds

    def _table(self, seconds: float) -> dict[str, float]:
        native = sum(self.spent.values())
        parts: dict[str, float] = {**self.spent, "python, numpy, sampler": seconds - native, "in all": seconds}
        return {kind: round(value * 1e3, 3) for kind, value in parts.items()}

    def decode(self, batch: int) -> dict[str, float]:
        """Milliseconds of a decode step by kind."""
        replayed = self._decode(batch, False)
        return {**self._table(self._decode(batch, True)), "replayed": round(replayed * 1e3, 3)}

    def prefill(self) -> dict[str, float]:
        """Milliseconds of a prefill by kind."""
        replayed = self._prefill(False)
        return {**self._table(self._prefill(True)), "replayed": round(replayed * 1e3, 3)}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The tables of this process's path: of each step the run that took least."""
    runs, phases = arguments.runs, Phases(arguments.model, arguments.threads, max(arguments.batch))
    found: dict[str, Any] = {}
    steps = {f"decode {batch}": partial(phases.decode, batch) for batch in arguments.batch}
    for name, run in {**steps, f"prefill {PREFILL}": phases.prefill}.items():
        run()
        found[name] = min((run() for _ in range(runs)), key=lambda table: table["in all"])
    return found


def of_path(path: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """measure() in a process on code path `path`."""
    command = [sys.executable, __file__, "--child", "--model", arguments.model]
    command += ["--threads", str(arguments.threads), "--runs", str(arguments.runs)]
    command += ["--batch", *map(str, arguments.batch)]
    environment = {**os.environ, "HEADRACE_NATIVE_PATH": path}
    text = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(json.loads(text.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--paths", nargs="+", default=None, help="those of avx512 and amx that run here")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", nargs="+", type=int, default=[8, 32], metavar="N", help="requests of a step")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2, help="processes of each path")
    parser.add_argument("--json", metavar="FILE", help="write a results file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments)))
        return
    arguments.paths = arguments.paths or [each for each in available_paths() if each in ("avx512", "amx")]
    if not arguments.paths:
        parser.error(f"neither avx512 nor amx runs here; name others: --paths {' '.join(available_paths())}")
    best: dict[str, dict[str, dict[str, float]]] = {}
    for _ in range(arguments.turns):
        for path in arguments.paths:
            for step, table in of_path(path, arguments).items():
                kept = best.setdefault(step, {})
                if path not in kept or table["in all"] < kept[path]["in all"]:
                    kept[path] = table
    for step, tables in best.items():
        print(f"{step}, ms: {', '.join(tables)}")
        most: dict[str, float] = {}
        for table in tables.values():
            for kind, value in table.items():
                most[kind] = max(most.get(kind, 0.0), value)
        for kind in sorted(most, key=lambda kind: -most[kind]):
            print(f"  {kind:28s}" + "".join(f"{table.get(kind, 0.0):10.2f}" for table in tables.values()))
    if arguments.json:
        write_results(arguments.json, "phases", [], more={"milliseconds": best})


if __name__ == "__main__":
    main()
