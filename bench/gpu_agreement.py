"""Greedy tokens of a GPU held against a CPU's in float32, position by position, and what `invariant` costs.

    .venv/bin/python bench/gpu_agreement.py --reference reference.json --prompts question.jsonl [-m MODEL]
    .venv/bin/python bench/gpu_agreement.py --reference reference.json [-m MODEL] [--json FILE]

The first makes the reference on any CPU: greedy answers in exact mode, and how far apart the two likeliest tokens were
at each of their positions. The second, on a GPU, is given those answers as prompts, so that every position is judged
with the same tokens before it: how often its own likeliest token is another, and how far apart the reference's two were
there. A GPU in float32 may differ only at ties, in bfloat16 only where the two are close. Then decode steps of made-up
weights of a shape (--shape) are timed with `invariant` and without, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.bench.results import Row, write_results
from headrace.bench.shapes import write_shape

TOKENS = 48
BATCHES = (1, 8, 32)


def make_reference(arguments: argparse.Namespace) -> None:
    """Write prompts, answers and gaps."""
    lines = Path(arguments.prompts).read_text(encoding="utf-8").splitlines()
    llm = LLM(arguments.model, device="cpu", mode="exact", max_model_len=1024)
    prompts = [llm.render([{"role": "user", "content": json.loads(line)["turns"][0]}]) for line in lines]
    prompts = [prompt for prompt in prompts if len(prompt) < 1024 - TOKENS]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
    rows = []
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        (choice,) = output.outputs
        best = [sorted((each.logprob for each in entry.values()), reverse=True) for entry in choice.logprobs or ()]
        rows.append({"prompt": prompt, "tokens": choice.token_ids, "gaps": [first - second for first, second in best]})
    Path(arguments.reference).write_text(json.dumps(rows))
    print(f"{len(rows)} answers, {sum(len(row['tokens']) for row in rows)} positions")


def agreement(arguments: argparse.Namespace, mode: str) -> dict[str, Any]:
    """Of an engine on the GPU: positions, those with another likeliest token, and the reference's gaps there."""
    rows = json.loads(Path(arguments.reference).read_text())
    llm = LLM(arguments.model, device="cuda", mode=mode, max_model_len=1024, kv_cache="2GiB")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
    gaps: list[float] = []
    positions = 0
    for row, output in zip(rows, llm.generate([row["prompt"] + row["tokens"] for row in rows], params), strict=True):
        found = (output.prompt_logprobs or [])[len(row["prompt"]) :]
        for entry, token, gap in zip(found, row["tokens"], row["gaps"], strict=True):
            positions += 1
            if entry is None or entry[token].rank != 1:
                gaps.append(gap)
    llm.close()
    gaps.sort(reverse=True)
    widest = ", ".join(f"{gap:.4f}" for gap in gaps[:8])
    print(f"{mode}: {len(gaps)} of {positions} positions differ; the widest gaps there: {widest}", flush=True)
    return {"positions": positions, "differ": len(gaps), "gaps": gaps}


def invariant_cost(shape: str, runs: int) -> list[Row]:
    """Milliseconds of decode steps with `invariant`, beside those without."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape(shape, Path(folder))
        options: dict[str, Any] = {"device": "cuda", "max_model_len": 1024, "kv_cache": "8GiB", "prefix_caching": False}
        sides = {name: LLM(model, invariant=name == "invariant", **options) for name in ("plain", "invariant")}
        for batch in BATCHES:
            prompts = [[7 + index] * 128 for index in range(batch)]

            def seconds(llm: LLM, count: int, prompts: list[list[int]] = prompts) -> float:
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                started = time.perf_counter()
                llm.generate(prompts, params)
                return time.perf_counter() - started

            taken: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(-2, runs):
                for name, llm in sides.items():
                    short = seconds(llm, 16)
                    step = (seconds(llm, 144) - short) / 128 * 1e3
                    if turn >= 0:
                        taken[name].append(step)
            ours, theirs = (statistics.median(taken[name]) for name in ("invariant", "plain"))
            case = f"{shape} bf16 decode batch {batch}, invariant"
            rows.append(Row(case, "ms", "lower", ours, theirs, "headrace without invariant", runs=runs, target=0.9))
            print(rows[-1].line(), flush=True)
        for llm in sides.values():
            llm.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="none: the default model")
    parser.add_argument("--reference", required=True, help="written with --prompts, read without")
    parser.add_argument("--prompts", metavar="FILE", help="MT-bench's question.jsonl")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", default="bench/results/h200/agreement.json")
    arguments = parser.parse_args()
    if arguments.prompts:
        make_reference(arguments)
        return
    found = {mode: agreement(arguments, mode) for mode in ("exact", "default")}
    rows = invariant_cost(arguments.shape, arguments.runs)
    write_results(arguments.json, "agreement", rows, "torch", "triton", more={"agreement": found})


if __name__ == "__main__":
    main()
