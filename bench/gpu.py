"""The GPU table: decode, time to first token, long and skewed contexts, offline throughput, start, for one model.

    python bench/gpu.py llama-3.1-8b --json bench/results/h200/llama-3.1-8b.json \\
        [--peer vllm.jsonl --peer-name "vllm 0.24.0"]

The model is a shape with made-up weights (llama-3.1-8b, llama-3.2-1b, smollm2-135m, tiny) or a path. Everything goes
through `LLM.generate`, prompts are token ids, greedy but for the offline case. A decode step's time is the difference
between long and short generations, so that prefill and start of a run cancel. `--peer` is a file of JSON lines with the
peer's own measurement of the same cases: {"case": "decode", "batch": 8, "tpot_ms": 5.0}, {"case": "ttft", "tokens":
1024, "ttft_ms": 36.5}, {"case": "long decode", "context": 32768, "batch": 1, "tpot_ms": ...}, {"case": "skewed decode",
"tpot_ms": ...}, {"case": "offline", "out_tok_s": ...}.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.bench.measure import median
from headrace.bench.results import Row, write_results
from headrace.bench.shapes import SHAPES, write_shape

SHORT, STEPS = 16, 128


class Table:
    """Runs cases on one engine and holds them against the peer's."""

    def __init__(self, llm: LLM, name: str, runs: int, peer: list[dict[str, Any]], peer_name: str):
        self.llm, self.name, self.runs, self.peer, self.peer_name = llm, name, runs, peer, peer_name
        self.rows: list[Row] = []
        self._draw = random.Random(0)
        self._top = llm.engine.spec.vocab_size - 1

    def prompt(self, length: int) -> list[int]:
        return [self._draw.randrange(min(10, self._top), self._top) for _ in range(length)]

    def seconds(self, prompts: Sequence[list[int]], lengths: Sequence[int], temperature: float = 0.0) -> float:
        params = [SamplingParams(temperature=temperature, seed=1, max_tokens=n, ignore_eos=True) for n in lengths]
        started = time.perf_counter()
        self.llm.generate(list(prompts), params)
        return time.perf_counter() - started

    def step_ms(self, prompts: Sequence[list[int]], steps: int) -> float:
        """Milliseconds of a decode step of these rows: the median over runs, a warm-up before."""
        self.seconds(prompts, [SHORT] * len(prompts))
        taken = []
        for _ in range(self.runs):
            short = self.seconds(prompts, [SHORT] * len(prompts))
            taken.append((self.seconds(prompts, [SHORT + steps] * len(prompts)) - short) / steps * 1e3)
        return median(taken)

    def add(self, work: str, unit: str, better: str, value: float, key: str, **case: Any) -> None:
        found = next((row for row in self.peer if all(row.get(name) == want for name, want in case.items())), None)
        row = Row(
            f"{self.name} {work}", unit, better, value, None if found is None else found[key],  # type: ignore[arg-type]
            None if found is None else self.peer_name, runs=self.runs,
        )  # fmt: skip
        print(row.line(), flush=True)
        self.rows.append(row)

    def decode(self, batch: int) -> None:
        value = self.step_ms([self.prompt(128) for _ in range(batch)], STEPS)
        self.add(f"decode batch {batch}", "ms", "lower", value, "tpot_ms", case="decode", batch=batch)

    def first_token(self, tokens: int) -> None:
        self.seconds([self.prompt(tokens)], [1])
        value = median([self.seconds([self.prompt(tokens)], [1]) for _ in range(max(3, self.runs))]) * 1e3
        self.add(f"ttft {tokens}", "ms", "lower", value, "ttft_ms", case="ttft", tokens=tokens)

    def long_decode(self, context: int, batch: int) -> None:
        value = self.step_ms([self.prompt(context - 200) for _ in range(batch)], STEPS // 2)
        work = f"decode context {context} batch {batch}"
        self.add(work, "ms", "lower", value, "tpot_ms", case="long decode", context=context, batch=batch)

    def skewed(self, longest: int) -> None:
        prompts = [self.prompt(longest), *(self.prompt(1000) for _ in range(31))]
        value = self.step_ms(prompts, STEPS // 2)
        self.add("skewed decode", "ms", "lower", value, "tpot_ms", case="skewed decode")

    def offline(self, count: int) -> None:
        draw = random.Random(0)
        lengths = [(draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(count)]
        prompts = [self.prompt(tokens) for tokens, _ in lengths]
        seconds = self.seconds(prompts, [tokens for _, tokens in lengths], temperature=0.6)
        value = sum(tokens for _, tokens in lengths) / seconds
        self.add("offline", "tok/s", "higher", value, "out_tok_s", case="offline", requests=count)


def pairs(text: str) -> list[tuple[int, int]]:
    """(context, batch) of "32768@1,32768@8"."""
    return [(int(a), int(b)) for a, b in (item.split("@") for item in filter(None, text.split(",")))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"{', '.join(SHAPES)}, or a path")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--batches", default="1,8,32,128,256")
    parser.add_argument("--prefill", default="1024,8000")
    parser.add_argument("--long", default="", help="contexts and batches: 32768@1,32768@8")
    parser.add_argument("--skewed", type=int, default=0, help="tokens of one long row beside 31 of 1,000")
    parser.add_argument("--offline", type=int, default=0, help="requests of 100 to 1,024 tokens in and out")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--peer-name", default="vllm")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    peer = [json.loads(line) for line in arguments.peer.read_text().splitlines()] if arguments.peer else []
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape(arguments.model, Path(folder)) if arguments.model in SHAPES else arguments.model
        started = time.perf_counter()
        with LLM(model, device=arguments.device, prefix_caching=False, max_model_len=arguments.max_model_len) as llm:
            dtype = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}[llm.engine.config.dtype]
            name = f"{Path(arguments.model).name} {dtype}"
            table = Table(llm, name, arguments.runs, peer, arguments.peer_name)
            table.seconds([table.prompt(16)], [1])
            table.add("start", "s", "lower", time.perf_counter() - started, "init_s", case="start")
            for batch in map(int, filter(None, arguments.batches.split(","))):
                table.decode(batch)
            for tokens in map(int, filter(None, arguments.prefill.split(","))):
                table.first_token(tokens)
            for context, batch in pairs(arguments.long):
                table.long_decode(context, batch)
            if arguments.skewed:
                table.skewed(arguments.skewed)
            if arguments.offline:
                table.offline(arguments.offline)
    if arguments.json:
        write_results(arguments.json, arguments.json.stem, table.rows, "torch", "triton")


if __name__ == "__main__":
    main()
