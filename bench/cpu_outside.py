"""What a decode step costs on a CPU outside the native kernels: scheduler, batch, sampler, ledger, drafts.

    python bench/cpu_outside.py [--model MODEL] [--rows 1 8 32] [--json bench/results/cpu/outside.json]

The engine runs as ever, on a real model, since what its Python takes depends on what kernels leave in the caches: each
native call is timed, and taken off the step. Medians over the steps of some batches, with the drafts named.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from headrace import LLM
from headrace.bench.compare import describe
from headrace.bench.measure import random_prompts
from headrace.bench.results import Row, write_results
from headrace.ops.native.library import library
from headrace.sampling.params import SamplingParams

STEPS, BATCHES, PROMPT = 160, 3, 32
DRAFTS: dict[str, dict[str, Any]] = {
    "": {},
    ", one draft by a look-up": {"speculate": "ngram", "num_draft_tokens": 1},
    ", one draft by the EAGLE head": {"speculate": "eagle", "num_draft_tokens": 1},
}


class Kernels:
    """Times the native calls of this process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        functions = library().functions
        for name, function in list(functions.items()):
            functions[name] = self._timed(function)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            self.seconds += time.perf_counter() - started
            return result

        return call


def measure(llm: LLM, kernels: Kernels, rows: int) -> tuple[float, float]:
    """(seconds outside kernels, seconds in them) of a decode step."""
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    outside, inside = [], []
    for batch in range(1 + BATCHES):
        prompts = random_prompts(llm.engine.spec.vocab_size, rows, PROMPT, seed=batch)
        outputs = [llm.engine.submit(prompt, params) for prompt in prompts]
        while not all(output.finished for output in outputs):
            kernels.seconds, started = 0.0, time.perf_counter()
            llm.engine.step()
            whole = time.perf_counter() - started
            if batch and all(output.outputs[0].token_ids for output in outputs):
                outside.append(whole - kernels.seconds)
                inside.append(kernels.seconds)
    return statistics.median(outside), statistics.median(inside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the default model, unless another is given")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--json", metavar="FILE", help="write a results file")
    arguments = parser.parse_args()
    rows: list[Row] = []
    library()
    kernels = Kernels()
    for drafts, own in DRAFTS.items():
        options = {"device": "cpu", "prefix_caching": False, "max_num_seqs": max(arguments.rows), **own}
        with LLM(arguments.model, **options) as llm:
            for count in arguments.rows:
                outside, inside = measure(llm, kernels, count)
                case = f"{describe(llm)} decode batch {count}{drafts}"
                rows.append(Row(f"{case}: outside kernels", "us/step", "lower", outside * 1e6, runs=BATCHES))
                rows.append(Row(f"{case}: in kernels", "us/step", "lower", inside * 1e6, runs=BATCHES))
                print(rows[-2].line(), f"in kernels {inside * 1e6:.0f}", flush=True)
    if arguments.json:
        write_results(arguments.json, "outside kernels", rows)


if __name__ == "__main__":
    main()
