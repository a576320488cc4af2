"""On a processor with AMX: are its tiles the ones that the tests emulate, and what does the path gain?

    python bench/cpu_amx.py [--model smollm2-135m] [--threads 2] [--json bench/results/cpu-amx/paths.json]

First the products of every weight format on the `amx` path, and an engine's tokens and logprobs, are compared, bit by
bit, with those of `amx-emulated`. If they differ, which order of summing would explain it is said, and the exit code
is 1. Then the same engines run on the `avx512` and `amx` paths in turns: decoding by 1, 8 and 32 requests and a prefill
of 1,024 tokens in each mode.
`--model dummy`: random weights of SmolLM2-135M's shape, 4 bits a weight and an 8-bit head, where the model's file is
not at hand. `--path amx-emulated --output 4 --runs 1` rehearses it all on another processor.

Each path is a process of its own. Where one dies, this program says in which work (exit code 3), and the process itself
leaves the signal and its code, the native stack as places in the libraries (`nm -nC` names them) and the Python stacks.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from headrace import LLM
from headrace.bench.measure import Timing, median, random_prompts, run_batch
from headrace.bench.results import Row, write_results
from headrace.bench.shapes import write_shape
from headrace.ops.native.library import NativeError, library
from headrace.ops.native.packed import Arena, StoredTensor, pack, packed_linear
from headrace.sampling.params import SamplingParams

BATCHES, PROMPT, PREFILL = (1, 8, 32), 32, 1024
MODES = ("default", "fast", "exact")
TOKENS = (1, 2, 5, 16, 17, 32, 33, 64, 100)
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
        scale[::4] *= 1e-3  # denormal in fp16
        data[:, :, place : place + 2] = scale.astype(np.float16).view(np.uint8)
    return data.reshape(rows, -1)


def products() -> dict[tuple[str, int], np.ndarray]:
    """What this process's path makes of the same matrices in every format and the same tokens, by format and their
    number."""
    rng, arena, found = np.random.default_rng(0), Arena(), {}
    for format in BLOCKS:
        k = 1280
        packed = pack([StoredTensor(format, random_rows(rng, format, 77, k), None)], k, arena, "default")
        x = rng.standard_normal((max(TOKENS), k), np.float32)
        for count in TOKENS:
            found[format, count] = packed_linear.variants["native"](x[:count], packed)
    return found


def differing_bits(own: dict[tuple[str, int], np.ndarray], emulated: dict[tuple[str, int], np.ndarray]) -> list[str]:
    """Formats and numbers of tokens in which `amx` and `amx-emulated` differ."""
    found = []
    for (format, count), product in own.items():
        if not np.array_equal(product, emulated[format, count]):
            ratio = np.abs(product - emulated[format, count]).max() / np.abs(product).max()
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
    """Which of ORDERS give the bits of this process's path for numbers that are bfloat16 already. Each 8 k lie in the
    order of csrc/bf16_weights.h."""
    rng = np.random.default_rng(1)

    def draw(rows: int) -> np.ndarray:
        bits = rng.standard_normal((rows, 64), np.float32).view(np.uint32) & 0xFFFF0000
        return bits.view(np.float32)

    x, w = draw(16), draw(32)
    bits = np.ascontiguousarray((w.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    packed = pack([StoredTensor("BF16", bits, None)], 64, Arena(), "default")
    product = packed_linear.variants["native"](x, packed)
    places = (np.arange(0, 64, 8)[:, None] + [0, 2, 4, 6, 1, 3, 5, 7]).ravel()
    return [name for name, order in ORDERS.items() if np.array_equal(order(x[:, places], w[:, places]), product)]


class Side:
    """What a path's process does; every method is asked for through its pipe."""

    def __init__(self, threads: int):
        self.threads = threads
        self.llms: dict[str, LLM] = {}
        self.inputs: dict[int, np.ndarray] = {}
        library().set_num_threads(threads)

    def products(self) -> dict[tuple[str, int], np.ndarray]:
        return products()

    def orders(self) -> list[str]:
        return explaining_orders()

    def open(self, model: str, mode: str, folder: str) -> None:
        options: dict[str, Any] = {"device": "cpu", "num_threads": self.threads, "mode": mode}
        if model == "dummy":
            model, options["quantize"] = write_shape("smollm2-135m", Path(folder)), "q4"
        self.llms[mode] = LLM(model, max_model_len=2048, max_num_seqs=max(BATCHES), **options)

    def answer(self) -> list[tuple[int, float]]:
        """Tokens and their logprobs after a prompt of 300 tokens: everything a path computes, attention too."""
        llm = self.llms["default"]
        prompt = random_prompts(llm.engine.spec.vocab_size, 1, 300)[0]
        params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True)
        choice = llm.generate([prompt], params)[0].outputs[0]
        assert choice.logprobs is not None
        return [(token, found[token].logprob) for token, found in zip(choice.token_ids, choice.logprobs, strict=True)]

    def run(self, mode: str, count: int, length: int, output: int) -> Timing:
        """`count` prompts of `length` tokens, `output` tokens for each."""
        llm = self.llms[mode]
        return run_batch(llm, random_prompts(llm.engine.spec.vocab_size, count, length), output)

    def linear(self, mode: str, tokens: int) -> tuple[float, float]:
        """Seconds of a step's linear layers alone, and of the head."""
        model = self.llms[mode].engine._worker.model
        x = self.inputs
        started = time.perf_counter()
        for layer in model.layers:
            for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
                if linear.in_size not in x or len(x[linear.in_size]) != tokens:
                    x[linear.in_size] = np.random.default_rng(2).standard_normal((tokens, linear.in_size), np.float32)
                linear(x[linear.in_size])
        body = time.perf_counter()
        model.logits(x[model.layers[0].mlp.gate_up.in_size][: 1 if tokens == PREFILL else tokens])
        return body - started, time.perf_counter() - body


TELL_FAULTS = """
#include <execinfo.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>
static struct sigaction before[65];
static void tell(int number, siginfo_t* info, void* context) {
  char text[160];
  void* frames[32];
  int length = snprintf(text, sizeof text, "signal %d, code %d (128: the kernel's own), address %p; native stack:\\n",
                        number, info->si_code, info->si_addr);
  (void)context, (void)!write(2, text, length);
  backtrace_symbols_fd(frames, backtrace(frames, 32), 2);
  sigaction(number, &before[number], NULL);  // the instruction runs again, and whoever was there before has a turn
}
void tell_faults(void) {
  struct sigaction action = {0};
  action.sa_sigaction = tell;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before[SIGSEGV]);
  sigaction(SIGBUS, &action, &before[SIGBUS]);
  sigaction(SIGILL, &action, &before[SIGILL]);
}
"""


def tell_faults() -> None:
    """Have this process leave its stacks on stderr if it is killed by a fault; without a C compiler only Python's."""
    faulthandler.enable(all_threads=True)
    compiler = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "faults.c"), Path(folder, "faults.so")
        source.write_text(TELL_FAULTS)
        if subprocess.run([compiler, "-O1", "-shared", "-fPIC", str(source), "-o", str(made)]).returncode == 0:
            ctypes.CDLL(str(made)).tell_faults()


def serve(pipe: Connection, threads: int) -> None:
    """A path's process: answers until the pipe is closed. The first answer is None, or why the path cannot be had."""
    tell_faults()
    try:
        side = Side(threads)
    except NativeError as error:
        pipe.send(str(error))
        return
    pipe.send(None)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(side, name)(*arguments))


class Died(Exception):
    """A path's process ended in the middle of its work."""


class PathProcess:
    """A process in which Headrace runs on code path `path`."""

    def __init__(self, path: str, threads: int):
        context = multiprocessing.get_context("spawn")
        self.path = path
        self._pipe, other = context.Pipe()
        before = os.environ.get("HEADRACE_NATIVE_PATH")
        os.environ["HEADRACE_NATIVE_PATH"] = path  # of the child, which is given this environment
        try:
            self._process = context.Process(target=serve, args=(other, threads), daemon=True)
            self._process.start()
        finally:
            os.environ.pop("HEADRACE_NATIVE_PATH")
            if before is not None:
                os.environ["HEADRACE_NATIVE_PATH"] = before
        other.close()
        if (refused := self._answer("start")) is not None:
            raise NativeError(refused)

    def ask(self, name: str, *arguments: Any) -> Any:
        """Side's method `name` in the process. Raises Died."""
        self._pipe.send((name, arguments))
        return self._answer(f"{name}{arguments}")

    def _answer(self, work: str) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode or 0
            end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise Died(f"the process on path {self.path} ended with {end} in {work}") from None

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


def linear_layers(sides: dict[str, PathProcess], mode: str, runs: int) -> list[str]:
    """Milliseconds of a step's linear layers alone, on both paths in turns; all else that a step takes is the rest."""
    lines = []
    for tokens in (*BATCHES, PREFILL):
        seconds: dict[str, list[tuple[float, float]]] = {path: [] for path in sides}
        for _ in range(runs + 1):
            for path, side in sides.items():
                seconds[path].append(side.ask("linear", mode, tokens))
        found = [
            f"{path} {' + '.join(f'{median(part[1:]) * 1e3:.2f}' for part in zip(*times, strict=True))} ms"
            for path, times in seconds.items()
        ]
        lines.append(f"linear layers + head, {tokens} tokens: {', '.join(found)}")
    return lines


def measured(sides: dict[str, PathProcess], runs: int, output: int) -> list[Row]:
    """Every work in every mode on both paths in turns; the first turn does not count."""
    work = {f"decode batch {count}": (count, PROMPT, output) for count in BATCHES}
    work[f"prefill {PREFILL}"] = (1, PREFILL, 1)
    timings: dict[tuple[str, str, str], list[Timing]] = {}
    for turn in range(runs + 1):
        for mode in MODES:
            for path, side in sides.items():
                for name, sizes in work.items():
                    timing = side.ask("run", mode, *sizes)
                    if turn:
                        timings.setdefault((mode, path, name), []).append(timing)

    def rate(path: str, mode: str, name: str) -> float:
        each = timings[mode, path, name]
        if name.startswith("decode"):
            return median([timing.decode_rate for timing in each])
        return median([PREFILL / timing.first_token for timing in each])

    slow, fast = sides
    return [
        Row(f"smollm2-135m q4_1 {mode} {name}", "tok/s", "higher", rate(fast, mode, name), rate(slow, mode, name),
            f"headrace, path {slow}", runs=runs)
        for mode in MODES for name in work
    ]  # fmt: skip


def compared(path: str, threads: int, model: str) -> list[str]:
    """How the path's bits differ from the emulated ones, said as well."""
    own, emulated = PathProcess(path, threads), PathProcess("amx-emulated", threads)
    found = differing_bits(own.ask("products"), emulated.ask("products"))
    if found:
        found.append(f"orders that would explain it: {'; '.join(own.ask('orders')) or 'none of those known'}")
    with tempfile.TemporaryDirectory() as folder:
        for side in (own, emulated):
            side.ask("open", model, "default", folder)
    if own.ask("answer") != emulated.ask("answer"):
        found.append("tokens and logprobs of an engine, attention on tiles included")
    for text in found:
        print(f"DIFFERS: {text}")
    if not found:
        print("the tiles give the bits of the emulated ones in every format, and in an engine's answers", flush=True)
    own.close()
    emulated.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=int, default=64, help="tokens that each request decodes")
    parser.add_argument("--path", default="amx", choices=("amx", "amx-emulated"))
    parser.add_argument("--json", metavar="FILE", help="write a results file")
    arguments = parser.parse_args()
    try:
        found = compared(arguments.path, arguments.threads, arguments.model)
        sides = {path: PathProcess(path, arguments.threads) for path in ("avx512", arguments.path)}
        with tempfile.TemporaryDirectory() as folder:
            for side in sides.values():
                for mode in MODES:
                    side.ask("open", arguments.model, mode, folder)
        rows = measured(sides, arguments.runs, arguments.output)
        linear = {mode: linear_layers(sides, mode, arguments.runs) for mode in MODES}
    except NativeError as error:
        print(f"this needs the amx path, see `headrace doctor`: {error}", file=sys.stderr)
        return 2
    except Died as error:
        print(f"DIED: {error}", file=sys.stderr)
        return 3
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
