"""Measuring attention: from how many rows or tokens on one kernel is faster than another on this GPU.

What a model's heads ask of a GPU is timed over a grid of span shapes with every kernel that can serve it: decode with
rotation inside and outside, short spans with their contexts split and whole, prompts alone by the library's attention
and by ours. The thresholds that follow go where every later process looks for them (ops/triton/attention_table.py).
Keys and values come from a ring of caches that no cache of the GPU holds, in blocks that lie in no order.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from pathlib import Path

import torch

from headrace.attention.base import LayerAttention
from headrace.attention.triton import TritonAttention
from headrace.bench.tiles import microseconds
from headrace.device.cuda import gpu_facts
from headrace.loading.checkpoint import open_checkpoint
from headrace.loading.store import resolve_model
from headrace.ops.triton import decode, spans
from headrace.ops.triton.attention_table import (
    NEVER,
    AttentionRule,
    AttentionShape,
    attention_folder,
    default_rule,
    measured_rules,
    write_rules,
)
from headrace.ops.triton.paged import HeadShape, PagedRows, Scores
from headrace.ops.triton.prefill import prefill_attention, prefill_tile
from headrace.ops.triton.rotate import rotate_and_write
from headrace.ops.triton.tile_table import MAX_TOKENS, file_name

PAGE = 16
QUERIES = 5  # of a short span: four drafts
_RING_BYTES = 1 << 28  # many times what the caches of a GPU hold
_PARTS = 4  # that a projection of few tokens comes in
_LAUNCHES = 16  # in a graph: one launch alone would be lost in the noise

Timer = Callable[[Callable[[int], None]], float]  # of body(launch): microseconds of one launch


@dataclass(frozen=True)
class Grid:
    """What is measured."""

    decode_rows: tuple[int, ...] = (1, 8, 16, 32, 64, 96, 128, 256)
    span_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 33, 65)
    contexts: tuple[int, ...] = (256, 2048, 16384)
    prompts: tuple[int, ...] = (128, 256, 512, 768, 1024, 2048, 4096)
    most_tokens: int = 600_000  # keys of a step; larger ones are left out


@dataclass(frozen=True)
class Timing:
    """One shape of step: microseconds of a layer with each kernel."""

    kind: str  # "decode", "short spans", "prompt"
    size: int  # rows; of a prompt tokens
    context: int
    taken: dict[str, float]

    @property
    def gain(self) -> float:
        """How many times faster the first kernel is than the second."""
        first, second = list(self.taken.values())[:2]
        return second / first

    def line(self) -> str:
        times = ", ".join(f"{name} {microseconds:.1f} us" for name, microseconds in self.taken.items())
        return f"{self.kind:11} {self.size:4} x {self.context:6}: {times}"


class Step:
    """Caches and arrays of a step of `rows` spans of `queries` tokens, each with a context of `context` keys."""

    def __init__(
        self, shape: HeadShape, dtype: torch.dtype, rows: int, queries: int, context: int, device: torch.device
    ):
        self.shape, self.rows, self.queries, self.tokens = shape, rows, queries, rows * queries
        self.context = context
        blocks = -(-context // PAGE)
        total = rows * blocks
        size = total * PAGE * shape.num_kv_heads * shape.head_dim * dtype.itemsize * 2
        count = max(1, min(_LAUNCHES, -(-_RING_BYTES // size))) if device.type == "cuda" else 1
        pages = (total, shape.num_kv_heads, PAGE, shape.head_dim)
        made = (torch.randn(pages, device=device).to(dtype) for _ in range(2 * count))
        self.caches = list(zip(made, made, strict=True))
        order = torch.randperm(total, device=device).to(torch.int32)

        def numbers(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.paged = PagedRows(
            order.view(rows, blocks), numbers(range(rows)), numbers(range(0, self.tokens + 1, queries)),
            numbers([context] * rows), numbers([rows]),
        )  # fmt: skip
        newest = torch.arange(context - queries, context, device=device)
        slots = self.paged.block_tables[:, newest // PAGE].long() * PAGE + newest % PAGE
        self.slots = slots.reshape(-1).to(torch.int32)
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        if self.tokens <= MAX_TOKENS:
            self.qkv = torch.randn((_PARTS, self.tokens, width), device=device)
        else:
            self.qkv = torch.randn((self.tokens, width), device=device).to(dtype)
        self.cos = torch.ones((self.tokens, shape.head_dim // 2), device=device)
        self.sin = torch.zeros_like(self.cos)
        self.scores = Scores(shape.head_dim**-0.5)
        self.q = torch.empty((self.tokens, shape.num_heads * shape.head_dim), device=device, dtype=dtype)
        self.out = torch.empty_like(self.q)
        self.device = device
        self.rotate(0)

    def cache(self, launch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.caches[launch % len(self.caches)]

    def rotate(self, launch: int) -> None:
        """Into `q` and the cache."""
        rotate_and_write(self.qkv, self.shape, self.cos, self.sin, self.cache(launch), self.slots, self.q)

    def tiles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As prefill_attention takes them."""
        size = prefill_tile(self.shape)
        found = [(span, first) for span in range(self.rows) for first in range(0, self.queries, size)]
        made = torch.tensor(found, dtype=torch.int32, device=self.device).T.contiguous()
        return made[0], made[1]


def time_decode(step: Step, timer: Timer) -> dict[str, float]:
    """Rotation and cache writes inside the kernel, and before it."""
    spaces = [
        decode.DecodeSpace.create(step.rows, step.shape, PAGE, step.q.dtype, step.device, step.context)
        for _ in range(2)
    ]
    for fused, space in enumerate(spaces):
        decode.plan_decode(step.paged, step.shape, 0, space, PAGE, fused == 1)
    given = decode.Projected(step.qkv, step.cos, step.sin)

    def attend(launch: int, source: decode.Projected | torch.Tensor) -> None:
        space = spaces[isinstance(source, decode.Projected)]
        decode.decode_attention(source, step.cache(launch), step.paged, step.shape, step.scores, space, step.out)

    def apart(launch: int) -> None:
        step.rotate(launch)
        attend(launch, step.q)

    return {"fused": timer(partial(attend, source=given)), "apart": timer(apart)}


def time_spans(step: Step, timer: Timer) -> dict[str, float]:
    """Contexts split among processors, and whole."""
    space = spans.SpanSpace.create(step.rows, step.queries, step.shape, step.device)
    spans.plan_spans(step.paged, step.shape, 0, space)
    tiles = step.tiles()

    def split(launch: int) -> None:
        spans.span_attention(step.q, step.cache(launch), step.paged, step.shape, step.scores, space, step.out)

    def whole(launch: int) -> None:
        prefill_attention(step.q, step.cache(launch), step.paged, tiles, step.shape, step.scores, step.out)

    return {"split": timer(split), "whole": timer(whole)}


def time_prompt(step: Step, timer: Timer) -> dict[str, float]:
    """The library's attention over q, k and v as they come from the projection, and ours over the pages."""
    shape, tiles = step.shape, step.tiles()
    layer = LayerAttention(step.scores.scale, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    size = shape.num_kv_heads * shape.head_dim
    k, v = (torch.randn((step.tokens, size), device=step.device).to(step.q.dtype) for _ in range(2))

    def library(launch: int) -> None:
        TritonAttention._attend_alone(step.q, k, v, layer, step.out)

    def ours(launch: int) -> None:
        prefill_attention(step.q, step.cache(launch), step.paged, tiles, shape, step.scores, step.out)

    return {"library": timer(library), "ours": timer(ours)}


def measure(
    shape: HeadShape, dtype: torch.dtype, grid: Grid, device: torch.device, timer: Timer, tell: Callable[[Timing], None]
) -> list[Timing]:
    """Every shape of the grid, with every kernel."""
    works = [("decode", rows, 1, context, time_decode) for rows in grid.decode_rows for context in grid.contexts]
    works += [("short spans", rows, QUERIES, c, time_spans) for rows in grid.span_rows for c in grid.contexts]
    works += [("prompt", 1, tokens, tokens, time_prompt) for tokens in grid.prompts]
    found = []
    for kind, rows, queries, context, run in works:
        if rows * context > grid.most_tokens:
            continue
        size = queries if kind == "prompt" else rows
        found.append(Timing(kind, size, context, run(Step(shape, dtype, rows, queries, context, device), timer)))
        tell(found[-1])
        gc.collect()
    return found


def _gains(timings: Sequence[Timing], kind: str) -> list[tuple[int, float]]:
    """(size, gain of the first kernel), smallest first; of several contexts the geometric mean, for which of them a
    step will have is not known."""
    gains: dict[int, list[float]] = {}
    for each in timings:
        if each.kind == kind:
            gains.setdefault(each.size, []).append(log(each.gain))
    return [(size, exp(sum(logs) / len(logs))) for size, logs in sorted(gains.items())]


def derive_rule(timings: Sequence[Timing], default: AttentionRule) -> AttentionRule:
    """Thresholds up to which, or from which on, all that was measured gains; `default` where nothing was measured."""

    def up_to(kind: str, default: int) -> int:
        last = 0
        for size, gain in (gains := _gains(timings, kind)):
            if gain < 1:
                break
            last = size
        return last if gains else default

    def from_on(kind: str, default: int) -> int:
        first = NEVER
        for size, gain in reversed(gains := _gains(timings, kind)):
            if gain < 1:
                break
            first = size
        return first if gains else default

    return replace(
        default,
        fused_rows=up_to("decode", default.fused_rows),
        split_rows=up_to("short spans", default.split_rows),
        alone_from=from_on("prompt", default.alone_from),
    )


def graph_timer(body: Callable[[int], None], runs: int = 5) -> float:
    """Microseconds of one launch, in a graph of several: the median of `runs`."""

    def launches() -> None:
        for launch in range(_LAUNCHES):
            body(launch)

    return microseconds(launches, _LAUNCHES, runs, torch.device("cuda"))


def tune_model_attention(model: str | None, say: Callable[[str], None]) -> Path:
    """Measure a model's attention in bfloat16 on this GPU and write its thresholds; returns the file that later starts
    read."""
    measured_rules()  # a damaged table is told before anything is measured, not after
    spec, gpu, dtype = open_checkpoint(resolve_model(model)).spec, gpu_facts().name, torch.bfloat16
    shape = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    key = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, str(dtype).removeprefix("torch."))
    with torch.inference_mode():
        timings = measure(
            shape, dtype, Grid(), torch.device("cuda"), graph_timer, tell=lambda timing: say(timing.line())
        )
    rule = derive_rule(timings, default_rule(key))
    say(
        f"decode with rotation inside up to {rule.fused_rows} rows; short spans split up to {rule.split_rows} rows; "
        + ("prompts never" if rule.alone_from == NEVER else f"prompts from {rule.alone_from} tokens on")
        + " by the library"
    )
    path = attention_folder() / file_name(gpu)
    write_rules(path, gpu, {key: rule})
    return path
