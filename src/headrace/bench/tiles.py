"""Measuring tiles: which cut of each product of a model is fastest on this GPU, for 16, 32 and 64 tokens.

The result goes where every later process looks for it (ops/triton/tile_table.py). Products read their weights from
memory as in a real step: they are taken from a ring of matrices that no cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from headrace.bench.measure import median
from headrace.models.spec import ModelSpec
from headrace.ops.triton import pointwise, skinny
from headrace.ops.triton.runtime import INTERPRETED
from headrace.ops.triton.tile_table import Product, Tile, file_name, user_folder, write_tiles

TOKENS = (16, 32, 64)
_RING_BYTES = 1 << 30  # many times what the caches of a GPU hold
_SHARED = 220 << 10  # bytes of shared memory that a program can have
_LAUNCHES = 24  # in a graph: one launch alone would be lost in the noise


@dataclass(frozen=True)
class Measured:
    """One product: microseconds with the tile that the engine would take now, and with the best one."""

    product: Product
    before: float
    best: float
    tile: Tile


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
    """Tiles worth a try: those whose pipeline fits in shared memory."""
    matrices = 2 if product.kind == "gated" else 1
    for inner in (64, 128, 256):
        for stages in (3, 4, 5, 6):
            for rows in (64, 128):
                size = (matrices * rows + product.tokens) * inner * 2 * stages
                if size <= _SHARED and product.inner % inner == 0:
                    for split in (1, 2, 4) if product.kind == "parts" else (1,):
                        if product.inner // split >= inner:
                            yield Tile(rows, inner, split, stages)


def current(product: Product) -> Tile:
    """What the engine takes."""
    if product.kind == "gated":
        return skinny.choose_gated_tile(product.tokens, product.rows, product.inner)
    return skinny.choose_tile(product.tokens, product.rows, product.inner, product.kind == "parts")


def measure(product: Product, device: torch.device, runs: int = 5) -> Measured:
    """Try all candidates. Tiles that the compiler refuses are left out."""
    halves = 2 if product.kind == "gated" else 1
    size = halves * product.rows * product.inner * 2
    count = max(2, min(_LAUNCHES, _RING_BYTES // size)) if not INTERPRETED else 2
    shape = (count, halves * product.rows, product.inner)
    weights = torch.randn(shape, device=device, dtype=torch.float32).mul_(0.02).to(torch.bfloat16)
    x = torch.randn((product.tokens, product.inner), device=device).to(torch.bfloat16)

    def time(tile: Tile) -> float:
        if product.kind == "gated":
            call: Callable[[torch.Tensor], object] = lambda weight: skinny.skinny_gated(  # noqa: E731
                x, weight, None, pointwise.SILU, tile
            )
        else:
            parts = product.kind == "parts"
            call = lambda weight: skinny.skinny_linear(x, weight, None, torch.bfloat16, parts, tile)  # noqa: E731
        return _microseconds(partial(_through, call, weights), count, runs, device)

    before = time(now := current(product))
    best, tile = before, now
    for each in candidates(product):
        try:
            taken = time(each)
        except Exception as error:  # its class and words differ from version to version
            if "out of resource" not in str(error) and "shared memory" not in str(error):
                raise
            continue
        if taken < best:
            best, tile = taken, each
    return Measured(product, before, best, tile)


def _through(call: Callable[[torch.Tensor], object], weights: torch.Tensor) -> None:
    for weight in weights:
        call(weight)


def _microseconds(body: Callable[[], None], launches: int, runs: int, device: torch.device) -> float:
    """Of one launch of `body`'s, in a graph: the median."""
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
    found = {}
    for product in products(spec):
        measured = measure(product, device)
        tell(measured)
        if measured.best < 0.99 * measured.before:
            found[product] = measured.tile
    path = user_folder() / file_name(gpu)
    write_tiles(path, gpu, found)
    return path
