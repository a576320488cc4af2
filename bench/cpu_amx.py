"""On a processor with AMX: are its tiles the ones that the tests emulate, and what does the path gain?

    python bench/cpu_amx.py [--model smollm2-135m] [--threads 2] [--json bench/results/cpu-amx/compare.json]

First the products of every weight format on the `amx` path are compared, bit by bit, with those of `amx-emulated`. If
they differ, which order of summing would explain it is said, and the exit code is 1. Then the same engine runs on the
`avx512` and `amx` paths in turns in one process: decoding by 1, 8 and 32 requests and a prefill of 1,024 tokens in each
mode. `--model dummy`: random weights of SmolLM2-135M's shape, 4 bits a weight and an 8-bit head, where the model's file
is not at hand.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from headrace import LLM
from headrace.bench.measure import Timing, median, random_prompts, run_batch
from headrace.bench.results import Row, write_results
from headrace.bench.shapes import write_shape
from headrace.ops.native.library import LIBRARY, NativeError, library, open_library
from headrace.ops.native.packed import Arena, StoredTensor, pack, packed_linear

BATCHES, PROMPT, OUTPUT, PREFILL = (1, 8, 32), 32, 64, 1024
TOKENS = (1, 5, 16, 17, 32, 33, 64, 100)
BLOCKS = {  # bytes of a block, weights in it, places of its fp16 scales
    "F16": (2, 1, ()), "BF16": (2, 1, ()), "Q4_0": (18, 32, (0,)), "Q4_1": (20, 32, (0, 2)), "Q5_0": (22, 32, (0,)),
    "Q5_1": (24, 32, (0, 2)), "Q8_0": (34, 32, (0,)), "Q4_K": (144, 256, (0, 2)), "Q5_K": (176, 256, (0, 2)),
    "Q6_K": (210, 256, (208,)), "Q4_64": (36, 64, (0, 2)), "Q8_64": (66, 64, (0,)),
}  # fmt: skip


def random_rows(rng: np.random.Generator, format: str, rows: int, k: int) -> np.ndarray:
    """uint8 [rows, row bytes]: a matrix as a file has it, with scales that keep products ordinary."""
    size, weights, scales = BLOCKS[format]
    if not scales:
        values = rng.standard_normal((rows, k), np.float32)
        half = values.astype(np.float16) if format == "F16" else (values.view(np.uint32) >> 16).astype(np.uint16)
        return np.ascontiguousarray(half).view(np.uint8)
    data = rng.integers(0, 256, (rows, k // weights, size), np.uint8)
    for place in scales:
        scale = 0.01 * (1 + rng.random((rows, k // weights, 1)))
        data[:, :, place : place + 2] = scale.astype(np.float16).view(np.uint8)
    return data.reshape(rows, -1)


def on(path: str) -> None:
    open_library(LIBRARY, path)


def differing_bits() -> list[str]:
    """Formats and numbers of tokens in which `amx` and `amx-emulated` differ."""
    rng, arena, found = np.random.default_rng(0), Arena(), []
    multiply = packed_linear.variants["native"]
    for format in BLOCKS:
        k = 1280
        packed = pack([StoredTensor(format, random_rows(rng, format, 77, k), None)], k, arena, "default")
        x = rng.standard_normal((max(TOKENS), k), np.float32)
        for count in TOKENS:
            products = {}
            for path in ("amx", "amx-emulated"):
                on(path)
                products[path] = multiply(x[:count], packed)
            if not np.array_equal(products["amx"], products["amx-emulated"]):
                ratio = np.abs(products["amx"] - products["amx-emulated"]).max() / np.abs(products["amx"]).max()
                found.append(f"{format} with {count} tokens: largest difference {ratio:.1e} of the largest number")
    return found


def _pairs_at_once(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    total = np.zeros((len(x), len(w)), np.float32)
    for k in range(0, x.shape[1], 2):
        total += x[:, k, None] * w[None, :, k] + x[:, k + 1, None] * w[None, :, k + 1]
    return total


def _one_chain(first: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def multiply(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        total = np.zeros((len(x), len(w)), np.float32)
        for k in range(0, x.shape[1], 2):
            for side in (first, 1 - first):
                total += x[:, k + side, None] * w[None, :, k + side]
        return total

    return multiply


def _two_chains(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    total = np.zeros((len(x), len(w)), np.float32)
    for start in range(0, x.shape[1], 32):
        even, odd = np.zeros_like(total), np.zeros_like(total)
        for k in range(start, start + 32, 2):
            even += x[:, k, None] * w[None, :, k]
            odd += x[:, k + 1, None] * w[None, :, k + 1]
        total += even + odd
    return total


ORDERS = {
    "two chains from zero for each 32 k, as the manual says": _two_chains,
    "one chain, even before odd": _one_chain(0),
    "one chain, odd before even": _one_chain(1),
    "pairs added first, then one chain": _pairs_at_once,
}


def explaining_orders() -> list[str]:
    """Which of ORDERS give the bits of the `amx` path for numbers that are bfloat16 already. Each 8 k lie in the order
    of csrc/bf16_weights.h."""
    rng = np.random.default_rng(1)

    def draw(rows: int) -> np.ndarray:
        bits = rng.standard_normal((rows, 64), np.float32).view(np.uint32) & 0xFFFF0000
        return bits.view(np.float32)

    x, w = draw(16), draw(32)
    bits = np.ascontiguousarray((w.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    packed = pack([StoredTensor("BF16", bits, None)], 64, Arena(), "default")
    on("amx")
    product = packed_linear.variants["native"](x, packed)
    places = (np.arange(0, 64, 8)[:, None] + [0, 2, 4, 6, 1, 3, 5, 7]).ravel()
    return [name for name, order in ORDERS.items() if np.array_equal(order(x[:, places], w[:, places]), product)]


def engines(model: str, threads: int, folder: Path) -> dict[str, LLM]:
    options: dict[str, Any] = {
        "device": "cpu",
        "num_threads": threads,
        "max_model_len": 2048,
        "max_num_seqs": max(BATCHES),
    }
    if model == "dummy":
        model, options["quantize"] = write_shape("smollm2-135m", folder), "q4"
    return {mode: LLM(model, mode=mode, **options) for mode in ("default", "fast", "exact")}


def linear_layers(llm: LLM, runs: int) -> list[str]:
    """Milliseconds of a step's linear layers alone, on both paths in turns; all else that a step takes is the rest."""
    model = llm.engine._worker.model
    rng = np.random.default_rng(2)
    lines = []
    for tokens in (*BATCHES, PREFILL):
        first = model.layers[0]
        each = (first.attention.qkv, first.attention.out, first.mlp.gate_up, first.mlp.down)
        x = {one.in_size: rng.standard_normal((tokens, one.in_size), np.float32) for one in each}
        seconds: dict[str, list[float]] = {"avx512": [], "amx": []}
        for _ in range(runs + 1):
            for path, times in seconds.items():
                on(path)
                started = time.perf_counter()
                for layer in model.layers:
                    for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
                        linear(x[linear.in_size])
                body = time.perf_counter()
                model.logits(x[first.mlp.gate_up.in_size][: 1 if tokens == PREFILL else tokens])
                times.append(body - started)
                times.append(time.perf_counter() - body)
        found = [f"{path} {median(t[2::2]) * 1e3:.2f} + {median(t[3::2]) * 1e3:.2f} ms" for path, t in seconds.items()]
        lines.append(f"linear layers + head, {tokens} tokens: {', '.join(found)}")
    return lines


def measured(llms: dict[str, LLM], runs: int) -> list[Row]:
    """Every work in every mode on both paths in turns; the first turn does not count."""
    vocabulary = next(iter(llms.values())).engine.spec.vocab_size
    prompts = random_prompts(vocabulary, max(BATCHES), PROMPT)
    long = random_prompts(vocabulary, 1, PREFILL)
    timings: dict[tuple[str, str, str], list[Timing]] = {}
    for turn in range(runs + 1):
        for mode, llm in llms.items():
            for path in ("avx512", "amx"):
                on(path)
                for count in BATCHES:
                    timing = run_batch(llm, prompts[:count], OUTPUT)
                    if turn:
                        timings.setdefault((mode, path, f"decode batch {count}"), []).append(timing)
                timing = run_batch(llm, long, 1)
                if turn:
                    timings.setdefault((mode, path, f"prefill {PREFILL}"), []).append(timing)
    rows = []
    for mode, path, work in timings:
        if path == "avx512":
            continue

        def rate(path: str, mode: str = mode, work: str = work) -> float:
            each = timings[mode, path, work]
            if work.startswith("decode"):
                return median([timing.decode_rate for timing in each])
            return median([PREFILL / timing.first_token for timing in each])

        case = f"smollm2-135m q4_1 {mode} {work}"
        rows.append(Row(case, "tok/s", "higher", rate("amx"), rate("avx512"), "headrace, path avx512", runs=runs))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write a results file")
    arguments = parser.parse_args()
    try:
        library()
        on("amx")
    except NativeError as error:
        print(f"this needs the amx path, see `headrace doctor`: {error}", file=sys.stderr)
        return 2
    library().set_num_threads(arguments.threads)
    found = differing_bits()
    for text in found:
        print(f"DIFFERS: {text}")
    if found:
        print(f"orders that would explain it: {'; '.join(explaining_orders()) or 'none of those known'}")
    else:
        print("the tiles give the bits of the emulated ones in every format")
    with tempfile.TemporaryDirectory() as folder:
        llms = engines(arguments.model, arguments.threads, Path(folder))
        rows = measured(llms, arguments.runs)
    linear = {mode: linear_layers(llm, arguments.runs) for mode, llm in llms.items()}
    for mode, lines in linear.items():
        for line in lines:
            print(f"{mode}: {line}")
    for row in rows:
        print(row.line())
    if arguments.json:
        weights = "random weights of this shape" if arguments.model == "dummy" else "the model's own weights"
        write_results(arguments.json, "compare", rows, more={"weights": weights, "tiles_as_emulated": not found,
                                                              "linear": linear})  # fmt: skip
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
