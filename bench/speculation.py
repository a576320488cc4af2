"""Speculation against plain decoding, in turns in one run: look-ups on the default model, each kind of work.

    .venv/bin/python bench/speculation.py [--proposers ngram suffix auto] [--json bench/results/cpu/speculation.json]

Greedy, one request at a time, prompt already in the prefix cache, so that decoding is what is timed. The tokens of all
sides are compared: a difference ends the run.
"""

from __future__ import annotations

import argparse
import time

from headrace import LLM, SamplingParams
from headrace.bench.measure import median
from headrace.bench.results import Row, write_results

CODE = """def add(a, b):
    return a + b

def subtract(a, b):
    return a - b

def multiply(a, b):
    return a * b

def divide(a, b):
    if b == 0:
        raise ZeroDivisionError("division by zero")
    return a / b
"""
RECORDS = '[{"name": "Ada", "year": 1815}, {"name": "Alan", "year": 1912}, {"name": "Grace", "year": 1906}]'
WORK = {
    "code-edit": [
        f"Rename the function add to plus in this code and print the whole file:\n```python\n{CODE}```",
        f"Copy the following code exactly, without changes:\n```python\n{CODE}```",
    ],
    "json-extract": [f"Print these records again, one a line:\n{RECORDS}", f"List every name in {RECORDS}"],
    "chat": [
        "Tell me about the history of the Roman empire and its emperors.",
        "What should I cook for dinner tonight?",
        "Explain to a child why it rains.",
    ],
}
TARGETS = {"code-edit": 1.8, "json-extract": 1.8, "chat": 0.98}
GREEDY = SamplingParams(temperature=0.0, max_tokens=160)


def run(llm: LLM, prompt: list[int]) -> tuple[float, list[int]]:
    """Seconds and tokens of one answer whose prompt is known."""
    llm.generate([prompt], GREEDY.with_(max_tokens=1))
    started = time.perf_counter()
    (output,) = llm.generate([prompt], GREEDY)
    return time.perf_counter() - started, output.outputs[0].token_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proposers", nargs="+", default=["ngram", "suffix", "auto"])
    parser.add_argument("--json", default="bench/results/cpu/speculation.json")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    plain = LLM()
    # what past outputs teach would make every turn but the first a quotation: here a request has its own text only
    alone = {"ngram": {}, "suffix": {"suffix_tokens": 0}, "auto": {"suffix_tokens": 0}}
    sides = {name: LLM(speculate=name, **alone[name]) for name in arguments.proposers}
    rows = []
    for work, texts in WORK.items():
        prompts = [plain.render([{"role": "user", "content": text}]) for text in texts]
        rates: dict[str, list[float]] = {name: [] for name in ("off", *sides)}
        for turn in range(arguments.runs + 1):
            expected: list[list[int]] = []
            for name, llm in {"off": plain, **sides}.items():
                results = [run(llm, prompt) for prompt in prompts]
                tokens = [each for _, each in results]
                if name == "off":
                    expected = tokens
                elif tokens != expected:
                    raise SystemExit(f"{work}: {name} changed the text")
                if turn:  # the first is a warm-up
                    rates[name].append(sum(map(len, tokens)) / sum(seconds for seconds, _ in results))
        for name in sides:
            rows.append(
                Row(
                    f"smollm2-135m q4_1 {plain.engine.config.mode} speculate {name} {work} batch 1",
                    "tok/s",
                    "higher",
                    median(rates[name]),
                    median(rates["off"]),
                    "headrace without speculation",
                    runs=arguments.runs,
                    target=TARGETS[work],
                )
            )
            print(rows[-1].line())
    write_results(arguments.json, "speculation", rows)


if __name__ == "__main__":
    main()
