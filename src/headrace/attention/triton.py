"""TritonAttention: every head size and feature on a GPU, over head-major pages; rotation and cache writes included."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.attention.base import AttentionCaps, LayerAttention
from headrace.core.kv_layout import KVGroup
from headrace.ops.triton.attention_table import NEVER, AttentionRule, attention_rule
from headrace.ops.triton.decode import DecodeSpace, Projected, decode_attention, plan_decode
from headrace.ops.triton.paged import HeadShape, PagedRows, Scores
from headrace.ops.triton.prefill import prefill_attention
from headrace.ops.triton.rotate import HeadNorms, rotate_and_write
from headrace.ops.triton.runtime import INTERPRETED, RUNTIME
from headrace.ops.triton.spans import MOST_QUERIES, SpanSpace, plan_spans, span_attention
from headrace.ops.xp import Array

LONGEST = 1 << 20  # keys of a row, where nobody says


@dataclass(frozen=True)
class TritonMeta:
    """What the layers of one group share in a step. Spans 0 .. num_decodes-1 have one token each."""

    paged: PagedRows
    slots: torch.Tensor  # int32 [T]
    num_decodes: int
    tiles: tuple[torch.Tensor, torch.Tensor] | None  # of the other spans, as prefill_attention takes them
    alone: tuple[tuple[int, int], ...]  # tokens from .. to of long spans that see nothing but themselves
    fused: bool  # spans of one token take rotation and cache writes upon themselves
    space: DecodeSpace
    short: SpanSpace | None = None  # spans but those of tiles and alone are short, and their contexts are split
    tree: tuple[torch.Tensor, torch.Tensor] | None = None  # as span_attention takes it
    # the first num_decodes tokens, in pieces of as many rows as a space serves; (): each is a span
    singles: tuple[tuple[PagedRows, DecodeSpace], ...] = ()


class TritonAttention:
    """Writes keys and values, then decodes with the context split and prefills in tiles, in one step if need be."""

    name = "triton"
    caps = AttentionCaps(
        devices=frozenset({"cuda"}),
        kv_formats=frozenset({"bfloat16", "float16", "float32"}),
        graph_support=True,
        trees=True,
    )

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.kv_format = "bfloat16"  # select_backend sets it
        self._spaces: list[DecodeSpace] = []
        self._rules: list[AttentionRule] = []
        self._short_spaces: list[SpanSpace] = []
        self._single_spaces: list[list[DecodeSpace]] = []  # of each group, one for every `max_rows` tokens

    def reserve(
        self,
        groups: tuple[KVGroup, ...],
        num_heads: int,
        max_rows: int,
        device: torch.device,
        max_len: int = LONGEST,
        most_queries: int = 0,
    ) -> None:
        """Take the memory of split decoding, once, before the first step. `most_queries`: tokens of the short spans
        that steps of drafts have at most, 0 if there are none."""
        shapes = [HeadShape(num_heads, group.num_kv_heads, group.head_dim) for group in groups]
        max_rows += 1  # one more, for the padding of graphs
        dtype: torch.dtype = getattr(torch, self.kv_format)
        self._spaces = [
            DecodeSpace.create(max_rows, shape, self.block_size, dtype, device, max_len) for shape in shapes
        ]
        if 0 < most_queries <= MOST_QUERIES and not RUNTIME.invariant:
            self._short_spaces = [SpanSpace.create(max_rows, most_queries, shape, device) for shape in shapes]
        if most_queries and RUNTIME.invariant:
            tokens = max_rows * most_queries
            self._single_spaces = [[each, *(each.beside() for _ in range(most_queries - 1))] for each in self._spaces]
            self._count = torch.arange(tokens + 1, dtype=torch.int32, device=device)
        self._max_rows = max_rows
        self._rules = [attention_rule(shape, self.kv_format) for shape in shapes]
        self._num_heads = num_heads

    def _short_space(self, batch: Any, group: int) -> SpanSpace | None:
        """Where a step of short spans is to be split: known from the number of its spans alone, as graphs must be."""
        if not batch.most_queries or not self._short_spaces:
            return None
        few = batch.spans.rows.shape[0] <= self._rules[group].split_rows
        return self._short_spaces[group] if few or batch.tree is not None else None

    @staticmethod
    def alone_from(layers: list[LayerAttention], dtype: torch.dtype) -> int:
        """Tokens from which a prompt without a prefix is left to the library's attention; beyond reason where that
        lacks what the layers need."""
        plain = all(layer.window is None and layer.soft_cap is None and layer.sinks is None for layer in layers)
        if not plain or dtype == torch.float32 or INTERPRETED or RUNTIME.invariant:
            return NEVER
        shapes = {HeadShape(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
        return max(attention_rule(shape, dtype).alone_from for shape in shapes)

    def plan(self, batch: Any, group: int, spec: KVGroup) -> TritonMeta:
        """Metadata of a DeviceBatch; cuts the contexts of its one-token spans into items."""
        spans, decodes = batch.spans, batch.num_decodes
        paged = PagedRows(
            batch.block_tables[group], spans.rows, spans.query_start, spans.seq_lens, batch.num_decode_rows
        )
        shape = HeadShape(self._num_heads, spec.num_kv_heads, spec.head_dim)
        if (short := self._short_space(batch, group)) is not None:
            paged = replace(paged, num_rows=spans.num_rows)
            plan_spans(paged, shape, spec.window or 0, short)
            tree = None if batch.tree is None else (batch.tree.ancestors, spans.positions)
            # beside trees there may be prompts
            tiles = batch.tiles if batch.longest > batch.most_queries and not batch.mixed else None
            return TritonMeta(
                paged, spans.slots[group], 0, tiles, batch.alone, False, self._spaces[group], short, tree
            )
        if batch.singles is not None:
            singles = self._singles(batch, paged, group, shape, spec.window or 0)
            count = batch.singles[0].shape[0]
            tiles = None if batch.mixed else batch.tiles
            return TritonMeta(
                paged, spans.slots[group], count, tiles, batch.alone, False, self._spaces[group], singles=singles
            )
        fused = decodes <= self._rules[group].fused_rows and not batch.mixed and not RUNTIME.invariant
        if decodes:
            first = replace(paged, rows=spans.rows[:decodes])
            plan_decode(first, shape, spec.window or 0, self._spaces[group], self.block_size, fused)
        return TritonMeta(paged, spans.slots[group], decodes, batch.tiles, batch.alone, fused, self._spaces[group])

    def _singles(
        self, batch: Any, paged: PagedRows, group: int, shape: HeadShape, window: int
    ) -> tuple[tuple[PagedRows, DecodeSpace], ...]:
        """Tokens of spans as rows of one token each, whose contexts end with them: what an engine without drafts would
        have computed, by the same kernel."""
        rows, num_rows = batch.singles
        count, pieces = rows.shape[0], []
        for first, space in zip(range(0, count, self._max_rows), self._single_spaces[group], strict=False):
            part = slice(first, min(count, first + self._max_rows))
            piece = replace(
                paged,
                rows=rows[part],
                query_start=self._count[part.start : part.stop + 1],
                seq_lens=batch.spans.positions[part] + 1,
                num_rows=(num_rows - first).clamp(0, part.stop - first),
            )
            plan_decode(piece, shape, window, space, self.block_size, False)
            pieces.append((piece, space))
        return tuple(pieces)

    def run(
        self, q: Array, k: Array, v: Array, cache: tuple[Array, Array], meta: TritonMeta, layer: LayerAttention
    ) -> Array:
        """See AttentionBackend."""
        nothing = q.new_zeros((q.shape[0], 0), dtype=torch.float32)
        qkv = torch.cat([q, k, v], dim=1)
        return self.run_fused(qkv, (nothing, nothing), None, cache, meta, layer)

    def run_fused(
        self,
        qkv: Array,
        angles: tuple[Array, Array],
        norms: HeadNorms | None,
        cache: tuple[Array, Array],
        meta: TritonMeta,
        layer: LayerAttention,
    ) -> Array:
        """Attention output [T, heads * D] of an unrotated qkv [T, q | k | v] or [parts, T, ...]."""
        shape = HeadShape(layer.num_heads, layer.num_kv_heads, layer.head_dim)
        scores = Scores(layer.scale, layer.soft_cap, layer.window or 0, layer.sinks)
        (cos, sin), decodes, tokens = angles, meta.num_decodes, meta.slots.shape[0]
        out = qkv.new_empty((tokens, shape.num_heads * shape.head_dim), dtype=cache[0].dtype)
        first = replace(meta.paged, rows=meta.paged.rows[:decodes])
        if decodes and meta.fused:
            decode_attention(Projected(qkv, cos, sin, norms), cache, first, shape, scores, meta.space, out)
        if decodes == tokens and meta.fused:
            return out
        q, rest = out.new_empty(out.shape), slice(decodes if meta.fused else 0, None)
        kv_size = shape.num_kv_heads * shape.head_dim
        keys = q.new_empty((tokens, kv_size)) if meta.alone else None
        rotate_and_write(
            qkv[..., rest, :], shape, cos[rest], sin[rest], cache, meta.slots[rest], q[rest], norms,
            None if keys is None else keys[rest],
        )  # fmt: skip
        if decodes and not meta.fused:
            for rows, space in meta.singles or ((first, meta.space),):
                decode_attention(q, cache, rows, shape, scores, space, out)
        if meta.short is not None:
            span_attention(q, cache, meta.paged, shape, scores, meta.short, out, meta.tree)
        if meta.tiles is not None:
            prefill_attention(q, cache, meta.paged, meta.tiles, shape, scores, out)
        if keys is not None:
            values = qkv[:, -kv_size:]
            for start, end in meta.alone:
                self._attend_alone(q[start:end], keys[start:end], values[start:end], layer, out[start:end])
        return out

    @staticmethod
    def _attend_alone(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerAttention, out: torch.Tensor
    ) -> None:
        """A prompt without a prefix, by the library (cuDNN on Hopper, as torch chooses)."""
        heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q.view(-1, heads, dim).transpose(0, 1)[None],
            k.view(-1, kv_heads, dim).transpose(0, 1)[None],
            v.reshape(-1, kv_heads, dim).transpose(0, 1)[None],
            is_causal=True,
            scale=layer.scale,
            enable_gqa=heads != kv_heads,
        )
        out.view(-1, heads, dim).copy_(mixed[0].transpose(0, 1))


class StepAttention:
    """The hook that a model's layers call in one step."""

    def __init__(self, backend: TritonAttention, cache: Any, metas: list[TritonMeta], layers: list[LayerAttention]):
        self._backend, self._cache, self._metas, self._layers = backend, cache, metas, layers

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        meta = self._metas[self._cache.group(layer)]
        return self._backend.run(q, k, v, self._cache.pages(layer), meta, self._layers[layer])

    def fused(self, layer: int, qkv: Array, angles: tuple[Array, Array], norms: tuple[Any, ...]) -> Array:
        """See layers.attention.Fused."""
        meta = self._metas[self._cache.group(layer)]
        scales = HeadNorms(norms[0].weight, norms[1].weight, norms[0].eps) if norms else None
        return self._backend.run_fused(qkv, angles, scales, self._cache.pages(layer), meta, self._layers[layer])
