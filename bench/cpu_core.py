"""The first table: Headrace and transformers on the default model, in turns in one run.

    .venv/bin/python bench/cpu_core.py [--json bench/results/cpu/core.json]

Both sides are given the same prompts (token ids) and generate the same number of greedy tokens. transformers runs in
fp32 on the weights that Headrace dequantised from the same file; Headrace in both its modes. Prompts are short, so that
what 16 requests gain over one is a matter of decoding.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

from headrace import LLM
from headrace.bench.measure import Timing, median, random_prompts, run_batch
from headrace.bench.results import Row, write_results
from headrace.bench.transformers_peer import load_peer

PROMPT, OUTPUT, RUNS = 12, 64, 5


def start_to_first_token(bytecode: str) -> float:
    """Seconds from exec to the first byte of text, model and tokenizer loaded, files in the page cache, and Python's
    bytecode in the folder `bytecode`: as an installed program has it, whatever this process's own settings are."""
    command = [sys.executable, "-m", "headrace", "run", "--quiet", "--max-tokens", "1", "Hello"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": bytecode}
    started = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        first = child.stdout.read(1)
        seconds = time.perf_counter() - started
        child.communicate()
    if not first or child.returncode:
        raise RuntimeError(f"headrace run gave no text (exit code {child.returncode})")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="bench/results/cpu/core.json")
    parser.add_argument("--runs", type=int, default=RUNS)
    arguments = parser.parse_args()
    engines = {"exact": LLM(mode="exact"), "default": LLM()}
    peer = load_peer(engines["exact"].engine.checkpoint)
    prompts = random_prompts(engines["exact"].engine.spec.vocab_size, 16, PROMPT)
    peer.run(prompts[:1], 2)
    timings: dict[tuple[str, int], list[Timing]] = {}
    theirs: list[float] = []
    first: list[float] = []
    bytecode = tempfile.TemporaryDirectory()
    for turn in range(arguments.runs + 1):
        for name, llm in engines.items():
            for count in (1, 16):
                timings.setdefault((name, count), []).append(run_batch(llm, prompts[:count], OUTPUT))
        theirs.append(peer.run(prompts[:1], OUTPUT))
        seconds = start_to_first_token(bytecode.name)
        if turn:  # the first turn writes the bytecode
            first.append(seconds)
    runs = arguments.runs
    rows = []
    for name in engines:
        what = f"smollm2-135m q4_1 {name}"
        one, many = timings[name, 1][1:], timings[name, 16][1:]  # the first turn is a warm-up
        generate = [median([timing.output_rate for timing in each]) for each in (one, many)]
        decode = [median([timing.decode_rate for timing in each]) for each in (one, many)]
        rows += [
            Row(f"{what} generate batch 1", "tok/s", "higher", generate[0], median(theirs[1:]), peer.name, runs=runs,
                target=1.0),
            Row(f"{what} generate batch 16", "tok/s", "higher", generate[1], generate[0], "headrace batch 1",
                runs=runs),
            Row(f"{what} decode batch 16", "tok/s", "higher", decode[1], decode[0], "headrace batch 1", runs=runs,
                target=4.0),
        ]  # fmt: skip
    rows.append(
        Row("smollm2-135m q4_1 default start to first token", "s", "lower", median(first), 2.5, "the goal", runs=runs,
            target=1.0)
    )  # fmt: skip
    for row in rows:
        print(row.line())
    write_results(arguments.json, "core", rows, "torch", "transformers")


if __name__ == "__main__":
    main()
