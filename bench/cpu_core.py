"""The first table: Headrace and transformers, both fp32, on the default model, in turns in one run.

    .venv/bin/python bench/cpu_core.py [--json bench/results/cpu/core.json]

Both sides are given the same prompts (token ids) and generate the same number of greedy tokens. transformers loads the
weights that Headrace dequantised from the same file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from headrace import LLM
from headrace.bench.measure import median, random_prompts, run_batch
from headrace.bench.results import Row, write_results
from headrace.bench.transformers_peer import load_peer

PROMPT, OUTPUT, RUNS = 32, 32, 5


def start_to_first_token() -> float:
    """Seconds from exec to the first visible token, model and tokenizer loaded, files in the page cache."""
    command = [sys.executable, "-m", "headrace", "run", "--quiet", "--max-tokens", "1", "Hello"]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="bench/results/cpu/core.json")
    parser.add_argument("--runs", type=int, default=RUNS)
    arguments = parser.parse_args()
    llm = LLM()
    peer = load_peer(llm.engine.checkpoint)
    prompts = random_prompts(llm.engine.spec.vocab_size, 16, PROMPT)
    run_batch(llm, prompts, 2)
    peer.run(prompts[:1], 2)
    ours: dict[int, list[float]] = {1: [], 16: []}
    theirs: list[float] = []
    first: list[float] = []
    for _ in range(arguments.runs):
        ours[1].append(run_batch(llm, prompts[:1], OUTPUT).output_rate)
        theirs.append(peer.run(prompts[:1], OUTPUT))
        ours[16].append(run_batch(llm, prompts, OUTPUT).output_rate)
        first.append(start_to_first_token())
    single = median(ours[1])
    what, runs = "smollm2-135m q4_1 exact", arguments.runs
    rows = [
        Row(f"{what} generate batch 1", "tok/s", "higher", single, median(theirs), peer.name, runs=runs, target=1.0),
        Row(f"{what} generate batch 16", "tok/s", "higher", median(ours[16]), single, "headrace batch 1", runs=runs,
            target=4.0),
        Row(f"{what} start to first token", "s", "lower", median(first), 2.5, "the goal", runs=runs, target=1.0),
    ]  # fmt: skip
    for row in rows:
        print(row.line())
    write_results(arguments.json, "core", rows, "torch", "transformers")


if __name__ == "__main__":
    main()
