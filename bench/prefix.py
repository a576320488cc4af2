"""What the prefix cache does for a second turn: its time to first token follows its new tokens, not its history.

    .venv/bin/python bench/prefix.py [--json bench/results/cpu/prefix.json]

One conversation of 1,024 tokens, answered with 32; then the same, its answer and 24 new tokens, on an engine that knows
the first turn and on one without a prefix cache, in turns in one run.
"""

from __future__ import annotations

import argparse
import time

from headrace import LLM, SamplingParams
from headrace.bench.measure import median, random_prompts
from headrace.bench.results import Row, write_results

HISTORY, ANSWER, NEW = 1024, 32, 24


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Milliseconds to the first token, and tokens found in the cache."""
    started = time.perf_counter()
    (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    return (time.perf_counter() - started) * 1e3, output.num_cached_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="bench/results/cpu/prefix.json")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    warm, cold = LLM(), LLM(prefix_caching=False)
    vocabulary = warm.engine.spec.vocab_size
    answer = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    ours: list[float] = []
    theirs: list[float] = []
    alone: list[float] = []
    for run in range(arguments.runs + 1):
        (history,) = random_prompts(vocabulary, 1, HISTORY, seed=run)
        (new,) = random_prompts(vocabulary, 1, NEW, seed=1000 + run)
        (output,) = warm.generate([history], answer)
        turn = history + output.outputs[0].token_ids + new
        found, cached = first_token(warm, turn)
        if cached < HISTORY + ANSWER - 16:
            raise SystemExit(f"only {cached} tokens were found")
        computed, _ = first_token(cold, turn)
        short, _ = first_token(cold, turn[cached:])
        if run:  # the first is a warm-up
            ours.append(found)
            theirs.append(computed)
            alone.append(short)
    what = f"smollm2-135m q4_1 {warm.engine.config.mode}"
    rows = [
        Row(f"{what} ttft second turn, {HISTORY} known + {NEW} new", "ms", "lower", median(ours), median(theirs),
            "headrace without prefix cache", runs=arguments.runs),
        Row(f"{what} ttft of the new tokens alone", "ms", "lower", median(alone), runs=arguments.runs),
    ]  # fmt: skip
    for row in rows:
        print(row.line())
    write_results(arguments.json, "prefix cache", rows)


if __name__ == "__main__":
    main()
