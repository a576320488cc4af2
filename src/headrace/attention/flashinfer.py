"""FlashInferAttention: prompts, and decode steps outside of graphs, by FlashInfer (Ye et al. 2025) over the same pages.
Never the selector's first choice: `attention_backend=flashinfer` asks for it.

FlashInfer plans on the host, from lengths that have to be read back from the GPU, so each step is waited for; and it
compiles its kernels at first use, with nvcc and ninja. Steps in graphs, steps of short spans that are split or
trees, and engines with `invariant` remain with our kernels. Rotation and cache writes are ours too.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from headrace.attention.base import AttentionCaps, LayerAttention
from headrace.attention.triton import TritonAttention, TritonMeta
from headrace.core.kv_layout import KVGroup
from headrace.ops.triton.paged import HeadShape, PagedRows, Scores
from headrace.ops.triton.rotate import HeadNorms, rotate_and_write
from headrace.ops.triton.runtime import RUNTIME
from headrace.ops.xp import Array

_WORKSPACE = 128 << 20  # bytes, as FlashInfer recommends


@dataclass(frozen=True)
class FlashInferMeta(TritonMeta):
    """A step whose spans FlashInfer attends; it plans at the first layer, which knows scale and cap."""

    planned: Any = None  # _Planned


@dataclass
class _Planned:
    """What FlashInfer is told of a step's spans, on the host: int32 arrays as its `plan` takes them."""

    query_start: torch.Tensor
    page_start: torch.Tensor
    pages: torch.Tensor
    last_page: torch.Tensor
    layers: set[tuple[HeadShape, Scores]] = field(default_factory=set)  # for which wrappers are planned in this step


def page_lists(paged: PagedRows, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(query_start [R + 1], page_start [R + 1], pages [P], keys in the last page [R]) int32 of R spans, none of them
    padding; on the host but for `pages`."""
    lengths = paged.seq_lens.cpu()
    counts = (lengths + page - 1) // page
    page_start = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    page_start[1:] = torch.cumsum(counts, 0)
    tables = paged.block_tables[paged.rows.long()]
    column = torch.arange(tables.shape[1], device=tables.device)
    pages = tables[column[None] < counts.to(tables.device)[:, None]]
    return paged.query_start.cpu(), page_start, pages, (lengths - 1) % page + 1


class FlashInferAttention(TritonAttention):
    """See the module."""

    name = "flashinfer"
    caps = AttentionCaps(
        devices=frozenset({"cuda"}),
        kv_formats=frozenset({"bfloat16", "float16"}),
        head_dims=frozenset({64, 128, 256}),
        sinks=False,
        graph_support=False,
        trees=True,  # by our kernels
    )

    def __init__(self, block_size: int):
        super().__init__(block_size)
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[tuple[HeadShape, Scores], Any] = {}

    @staticmethod
    def unavailable() -> str | None:
        """Why FlashInfer cannot be used in this process; None if it can."""
        if importlib.util.find_spec("flashinfer") is None:
            return "FlashInfer is not installed: pip install 'headrace[flashinfer]'"
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
        if shutil.which("nvcc") is None and not os.path.exists(os.path.join(home, "bin", "nvcc")):
            return "FlashInfer compiles its kernels and finds no nvcc: install the CUDA toolkit or set CUDA_HOME"
        if shutil.which("ninja") is None:
            return "FlashInfer compiles its kernels and finds no ninja: pip install ninja"
        return None

    def plan(self, batch: Any, group: int, spec: KVGroup) -> TritonMeta:
        """As TritonAttention's; steps that run as they are, with spans of more than a few tokens or decode rows only,
        are FlashInfer's. So are none without memory (worker/rehearsal.py), whose lengths nobody can read."""
        meta = super().plan(batch, group, spec)
        in_graph = batch.mixed or batch.logit_index is None
        if in_graph or meta.short is not None or RUNTIME.invariant or meta.slots.is_meta:
            return meta
        paged = replace(meta.paged, num_rows=batch.spans.num_rows)
        planned = _Planned(*page_lists(paged, self.block_size))
        return FlashInferMeta(
            paged, meta.slots, num_decodes=0, tiles=None, alone=(), fused=False, space=meta.space, planned=planned
        )

    def run_fused(
        self,
        qkv: Array,
        angles: tuple[Array, Array],
        norms: HeadNorms | None,
        cache: tuple[Array, Array],
        meta: TritonMeta,
        layer: LayerAttention,
    ) -> Array:
        """See TritonAttention.run_fused."""
        if not isinstance(meta, FlashInferMeta):
            return super().run_fused(qkv, angles, norms, cache, meta, layer)
        shape = HeadShape(layer.num_heads, layer.num_kv_heads, layer.head_dim)
        tokens = meta.slots.shape[0]
        q = qkv.new_empty((tokens, shape.num_heads * shape.head_dim), dtype=cache[0].dtype)
        rotate_and_write(qkv, shape, *angles, cache, meta.slots, q, norms)
        mixed = self._wrapper(meta.planned, q, shape, layer).run(q.view(tokens, layer.num_heads, -1), cache)
        return mixed.reshape(tokens, -1)

    def _wrapper(self, planned: _Planned, q: torch.Tensor, shape: HeadShape, layer: LayerAttention) -> Any:
        """FlashInfer's, planned for this layer; layers of a group are alike, so once a step as a rule."""
        scores = Scores(layer.scale, layer.soft_cap, layer.window or 0)
        wanted = (shape, scores)
        if wanted not in self._wrappers:
            import flashinfer

            if self._workspace is None:
                self._workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device)
            self._wrappers[wanted] = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="HND")
        if wanted not in planned.layers:
            self._wrappers[wanted].plan(
                planned.query_start, planned.page_start, planned.pages, planned.last_page,
                shape.num_heads, shape.num_kv_heads, shape.head_dim, self.block_size,
                causal=True, sm_scale=scores.scale, window_left=scores.window - 1,
                logits_soft_cap=scores.soft_cap, q_data_type=q.dtype, kv_data_type=q.dtype,
            )  # fmt: skip
            planned.layers.add(wanted)
        return self._wrappers[wanted]
