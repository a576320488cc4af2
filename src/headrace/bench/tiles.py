"""Measuring tiles: which cut of each product of a model is fastest on this GPU, for 16 to 256 tokens.

The result goes where every later process looks for it (ops/triton/tile_table.py). Products read their weights from
memory as in a real step: they are taken from a ring of matrices that no cache holds. A product in parts is measured
with the norm that adds them up. What more than 64 tokens are measured against is the library's product and the
activation.
Kernels are compiled before, in several processes, since that takes longer than measuring them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from headrace import ops
from headrace.bench.measure import median
from headrace.models.spec import ModelSpec
from headrace.ops.triton import pointwise, skinny
from headrace.ops.triton.norm import add_rms_norm
from headrace.ops.triton.runtime import INTERPRETED
from headrace.ops.triton.tile_table import MAX_TOKENS, Product, Tile, file_name, user_folder, write_tiles

TOKENS = (16, 32, 64, 128, 256)
_MOST_JOBS = 16  # processes that compile
_RING_BYTES = 1 << 30  # many times what the caches of a GPU hold
_SHARED = 220 << 10  # bytes of shared memory that a program can have
_LAUNCHES = 24  # in a graph: one launch alone would be lost in the noise


@dataclass(frozen=True)
class Measured:
    """One product: microseconds with what the engine would take now, and with the best tile."""

    product: Product
    before: float
    best: float
    tile: Tile | None  # None: the library's product is the best


def products(spec: ModelSpec) -> list[Product]:
    """What a model's steps of few tokens multiply, each shape once. Experts have kernels of their own."""
    shapes = [
        ("parts", spec.q_size + 2 * spec.kv_size, spec.hidden_size),
        ("parts", spec.hidden_size, spec.q_size),
        ("gated", spec.intermediate_size, spec.hidden_size),
        ("parts", spec.hidden_size, spec.intermediate_size),
        ("plain", spec.vocab_size, spec.hidden_size),
    ]
    return [Product(kind, tokens, rows, inner) for kind, rows, inner in dict.fromkeys(shapes) for tokens in TOKENS]


def candidates(product: Product) -> Iterator[Tile]:
    """Tiles worth a try: those whose pipeline fits in shared memory and whose sums fit in registers."""
    matrices = 2 if product.kind == "gated" else 1
    wide = product.tokens > MAX_TOKENS
    for inner in (64, 128) if wide else (64, 128, 256):
        for stages in (3, 4, 5, 6):
            for rows in (64, 128):
                for tokens in {min(product.tokens, most) for most in ((128, 256) if wide else (MAX_TOKENS,))}:
                    size = (matrices * rows + tokens) * inner * 2 * stages
                    sums = matrices * rows * tokens  # in float32
                    if size > _SHARED or sums > 32768 or product.inner % inner:
                        continue
                    for split in (1, 2, 4) if product.kind == "parts" else (1,):
                        if product.inner // split >= inner and product.inner % (inner * split) == 0:
                            yield Tile(rows, inner, split, stages, 8 if sums > 8192 else 4, max(tokens, MAX_TOKENS))


def current(product: Product) -> Tile | None:
    """What the engine takes; None: the library's product."""
    if product.tokens > MAX_TOKENS:
        return skinny.wide_tile(product.tokens, product.rows, product.inner, product.kind)
    if product.kind == "gated":
        return skinny.choose_gated_tile(product.tokens, product.rows, product.inner)
    return skinny.choose_tile(product.tokens, product.rows, product.inner, product.kind == "parts")


class Bench:
    """One product's matrices, and what a step does with one of them."""

    def __init__(self, product: Product, device: torch.device, ring_bytes: int):
        self.product, self._device = product, device
        halves = 2 if product.kind == "gated" else 1
        size = halves * product.rows * product.inner * 2
        count = max(1, min(_LAUNCHES, ring_bytes // size)) if not INTERPRETED else 2
        shape = (count, halves * product.rows, product.inner)
        self._weights = torch.randn(shape, device=device, dtype=torch.bfloat16)
        self._x = torch.randn((product.tokens, product.inner), device=device).to(torch.bfloat16)
        self._residual = torch.zeros((product.tokens, product.rows), device=device)
        self._scale = torch.ones(product.rows, device=device, dtype=torch.bfloat16)

    def call(self, weight: torch.Tensor, tile: Tile | None) -> torch.Tensor:
        """The product with `weight`, and what belongs to it."""
        kind, x = self.product.kind, self._x
        if kind == "gated":
            if tile is None:
                return ops.silu_mul.variants["triton"](torch.mm(x, weight.T))
            return skinny.skinny_gated(x, weight, None, pointwise.SILU, tile)
        if kind == "plain":
            if tile is None:
                return torch.mm(x, weight.T, out_dtype=torch.float32) if weight.is_cuda else torch.mm(x, weight.T)
            return skinny.skinny_linear(x, weight, None, torch.float32, False, tile)
        out = torch.mm(x, weight.T) if tile is None else skinny.skinny_linear(x, weight, None, x.dtype, True, tile)
        return add_rms_norm(out, self._residual, self._scale, 1e-5)[0]

    def time(self, tile: Tile | None, runs: int = 5) -> float:
        """Microseconds."""
        body = partial(_through, partial(self.call, tile=tile), self._weights)
        return microseconds(body, len(self._weights), runs, self._device)


def _too_large(error: Exception) -> bool:
    """The compiler found that a tile needs more than there is; class and words differ from version to version."""
    return "out of resource" in str(error) or "shared memory" in str(error)


def measure(product: Product, device: torch.device, runs: int = 5) -> Measured:
    """Try all candidates. Tiles that the compiler refuses are left out."""
    bench = Bench(product, device, _RING_BYTES)
    before = bench.time(now := current(product), runs)
    best, tile = before, now
    for each in candidates(product):
        try:
            taken = bench.time(each, runs)
        except Exception as error:
            if not _too_large(error):
                raise
            continue
        if taken < best:
            best, tile = taken, each
    return Measured(product, before, best, tile)


def compile_tiles(wanted: Sequence[tuple[Product, Tile]]) -> None:
    """Compile the kernels of tiles, so that they lie in Triton's cache. Runs in a process of its own."""
    device = torch.device("cuda")
    for product in dict.fromkeys(product for product, _ in wanted):
        torch.cuda.empty_cache()
        bench = Bench(product, device, 0)
        for tile in (tile for each, tile in wanted if each == product):
            try:
                bench.call(bench._weights[0], tile)
            except Exception as error:
                if not _too_large(error):
                    raise
        del bench


def compile_all(wanted: Sequence[tuple[Product, Tile]]) -> None:
    """Compile the kernels of tiles in several processes."""
    jobs = min(_MOST_JOBS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        list(pool.map(compile_tiles, [wanted[start::jobs] for start in range(jobs)]))


def _through(call: Callable[[torch.Tensor], object], weights: torch.Tensor) -> None:
    for weight in weights:
        call(weight)


def microseconds(body: Callable[[], None], launches: int, runs: int, device: torch.device) -> float:
    """Of one of the launches that `body` makes, in a graph: the median of `runs`. Without a GPU 1, for tests."""
    body()
    if device.type != "cuda":
        return 1.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    taken = []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) * 1e3 / launches)
    return median(taken)


def tune(spec: ModelSpec, device: torch.device, gpu: str, tell: Callable[[Measured], None]) -> Path:
    """Measure every product of a model and write what gains at least 1 %; returns the file."""
    compile_all([(product, tile) for product in products(spec) for tile in candidates(product)])
    found = {}
    for product in products(spec):
        measured = measure(product, device)
        tell(measured)
        if measured.tile is not None and measured.best < 0.99 * measured.before:
            found[product] = measured.tile
    path = user_folder() / file_name(gpu)
    write_tiles(path, gpu, found)
    return path
