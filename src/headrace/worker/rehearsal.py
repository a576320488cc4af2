"""Steps of a model without memory: which kernels an engine will call is learnt from the very calls.

A worker like the real one is made on torch's meta device, where tensors have shapes, dtypes and addresses within their
memory but no memory, and goes through steps of the kinds that are to come, those that come first at first. Only the
leading layers are made, as many as it takes to have one of each kind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from headrace.config import EngineConfig
from headrace.core.kv_layout import KVLayout
from headrace.core.plan import StepPlan
from headrace.device.cpu import num_threads
from headrace.layers.weights import Checkpoint
from headrace.models.spec import MOST_LAYERS, ModelSpec
from headrace.ops.triton.ahead import MOST_THREADS, Ahead, Mark, can_compile_ahead
from headrace.worker.device_runner import DeviceRunner
from headrace.worker.device_worker import DeviceWorker
from headrace.worker.drafting import DraftSource
from headrace.worker.graphs import AT_START, GraphKey

META = torch.device("meta")
# tokens of prompts whose kernels are compiled ahead: whether a number is a multiple of 16 is a variant of its own
PROMPTS = (24, 32, 15, 48, 60, 64, 100, 512, 800, 1024)
FEW = 4  # tokens that a row begins with


class _LibraryShapes(TorchFunctionMode):
    """Gives what the library computes its shape. torch would do it too, on the meta device, by Python code whose import
    takes a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.mm:
            return args[0].new_empty((args[0].shape[0], args[1].shape[1]))
        if func is torch.addmm:
            return args[1].new_empty((args[1].shape[0], args[2].shape[1]))
        if func is torch.nn.functional.scaled_dot_product_attention:
            return args[0].new_empty(args[0].shape)
        return func(*args, **(kwargs or {}))


class NoWeights:
    """A `Checkpoint` with the shapes of another and no numbers."""

    def __init__(self, checkpoint: Checkpoint, num_layers: int):
        """Tensors of layers from `num_layers` on are left out."""
        self._checkpoint = checkpoint
        self._names = [name for name in checkpoint.names() if _layer(name) < num_layers]

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def read(self, name: str) -> np.ndarray:
        """Zeros that take no memory."""
        return np.broadcast_to(np.float32(0), self.shape(name))

    def fill(self, name: str, target: torch.Tensor) -> None:
        """`target` has no numbers either."""


def _layer(name: str) -> int:
    """Number of the layer that a tensor belongs to; -1 for those beside the layers."""
    words = name.split(".")
    return int(words[2]) if words[:2] == ["model", "layers"] and len(words) > 2 and words[2].isdigit() else -1


def shortened(spec: ModelSpec) -> ModelSpec:
    """The model with as many of its layers as have one of each kind: at least two, for the second continues one."""
    kinds = [(spec.window(i), spec.layer_rope(i), spec.layer_moe(i)) for i in range(spec.num_layers)]
    last = max(kinds.index(kind) for kind in set(kinds))
    count = min(spec.num_layers, max(2, last + 1))
    return replace(spec, num_layers=count, windows=spec.windows[:count])


def compile_ahead(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    config: EngineConfig,
    layout: KVLayout,
    attention_backend: str | None = None,
    draft: DraftSource | None = None,
) -> Ahead | None:
    """Begin to compile what the worker of these arguments will need; None where there is nothing to compile, or what is
    needed cannot be learnt, which is said."""
    if not can_compile_ahead():
        return None
    counted = replace(config, kv_cache_bytes=0, num_blocks=0, num_threads=0)  # what depends on free memory
    drafts = None if draft is None else (draft.spec, draft.layout.groups, draft.head, draft.states)
    ahead = Ahead(max(1, min(MOST_THREADS, num_threads())))
    try:
        mark = Mark(spec, counted, layout.groups, attention_backend, drafts)
        if mark.there:
            return None
        with ahead.record():
            rehearse(spec, checkpoint, config, layout, attention_backend, draft)
    except Exception as error:  # it would only have saved time
        why = str(error).partition("\n")[0] or type(error).__name__
        print(f"headrace: kernels are compiled when they are needed first, not ahead: {why}", file=sys.stderr)
        return None
    ahead.start(mark.leave)
    return ahead


def rehearse(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    config: EngineConfig,
    layout: KVLayout,
    attention_backend: str | None = None,
    draft: DraftSource | None = None,
) -> None:
    """Go through the steps of an engine of these arguments."""
    short = spec if draft is not None else shortened(spec)  # a head that drafts may continue any layer
    if draft is not None:
        draft = replace(draft, checkpoint=NoWeights(draft.checkpoint, MOST_LAYERS))
    weights = NoWeights(checkpoint, short.num_layers)
    worker = DeviceWorker(short, weights, config, layout, attention_backend, device=META, draft=draft)
    try:
        with _LibraryShapes():
            for step, warm, cut in steps(worker.runner, config):
                worker.runner.rehearse(step, warm, cut)
    finally:
        worker.stop()


def steps(runner: DeviceRunner, config: EngineConfig) -> Iterator[tuple[GraphKey | StepPlan, bool, bool]]:
    """(a graph's key or a plan, some row has a temperature, some is cut) of the steps to come."""
    launcher, most = runner.launcher, min(config.max_num_batched_tokens, config.max_model_len - 1)
    prompts = [size for size in PROMPTS if size <= most] or [most]
    rows = launcher.rows if config.graphs else [size for size in (1, 2, 3, 16, 32, 64) if size <= config.max_num_seqs]

    def decodes(sizes: Iterable[int], warm: bool, cut: bool) -> Iterator[tuple[GraphKey | StepPlan, bool, bool]]:
        for size in sizes:
            key = GraphKey(size, size, warm, cut) if config.graphs else plan_of([1] * size, FEW)
            yield key, warm, cut

    yield plan_of(prompts[:1], 0), False, False
    yield from decodes([size for size in rows if size <= AT_START], False, False)
    for size in prompts:
        yield plan_of([size], 0), False, False
    yield plan_of(prompts[:1], 0), True, False
    yield from decodes(rows[:1], True, False)
    yield from decodes([size for size in rows if size > AT_START], False, False)
    yield from decodes(rows, True, False)
    yield from decodes(rows, True, True)
    if config.max_num_seqs > 1 and most > 2 * FEW:
        for size in (size for size in prompts if size < most):
            yield plan_of([1, size], FEW), False, False  # beside rows that decode
            yield plan_of([1, size], FEW), True, True
    if config.graphs:
        for key in launcher.other_keys():
            yield key, key.warm, key.cut


def plan_of(lengths: list[int], start: int) -> StepPlan:
    """A step of spans of so many tokens, each from token `start` of its row on."""
    spans = np.zeros((4, len(lengths)), np.int32)
    spans[0], spans[1], spans[2] = np.arange(len(lengths)), start, lengths
    return StepPlan(0, spans=spans, yields=np.ones(len(lengths), bool))
