"""Steps built by hand: runs a model over rows with a paged cache, without scheduler or worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from headrace.attention.reference import ReferenceAttention
from headrace.layers.weights import WeightSource
from headrace.models.blocks import CausalLM
from headrace.models.registry import build_model
from headrace.models.spec import ModelSpec
from headrace.resolve import kv_groups
from headrace.worker.batch import ShapeKey, StepBatch


class DictCheckpoint:
    """A checkpoint held in memory."""

    def __init__(self, tensors: dict[str, np.ndarray]):
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> np.ndarray:
        return np.asarray(self.tensors[name], np.float32)


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of `spec` must have."""
    hidden, inner, q, kv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if spec.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (spec.head_dim,)
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q, hidden, spec.qkv_bias),
            ("self_attn.k_proj", kv, hidden, spec.qkv_bias),
            ("self_attn.v_proj", kv, hidden, spec.qkv_bias),
            ("self_attn.o_proj", hidden, q, spec.output_bias),
            ("mlp.gate_proj", inner, hidden, spec.mlp_bias),
            ("mlp.up_proj", inner, hidden, spec.mlp_bias),
            ("mlp.down_proj", hidden, inner, spec.mlp_bias),
        ):
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
    return shapes


def random_tensors(spec: ModelSpec, seed: int = 0, std: float = 0.15) -> dict[str, np.ndarray]:
    """Random weights for every tensor of `spec`; norms lie around 1."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape, np.float32) * std + (1.0 if "norm" in name else 0.0)
        for name, shape in expected_shapes(spec).items()
    }


def random_model(spec: ModelSpec, seed: int = 0, std: float = 0.15) -> CausalLM:
    return build_model(spec, WeightSource(DictCheckpoint(random_tensors(spec, seed, std))))


def make_batch(
    positions: Sequence[np.ndarray],
    tables: Sequence[Sequence[np.ndarray]],
    block_size: int,
    token_ids: np.ndarray | None = None,
    padding: int = 0,
) -> StepBatch:
    """A batch of spans at `positions` with `tables`[group][span]; logits of every token; `padding` tokens behind."""
    lengths = [len(p) for p in positions]
    spans = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    flat = np.concatenate(positions).astype(np.int32)
    width = max(len(table) for group in tables for table in group)
    padded, slots = [], []
    for group in tables:
        table = np.zeros((len(group), width), np.int32)
        for span, ids in enumerate(group):
            table[span, : len(ids)] = ids
        padded.append(table)
        group_slots = table[spans, flat // block_size] * block_size + flat % block_size
        slots.append(np.concatenate([group_slots, np.full(padding, -1)]).astype(np.int32))
    ids = np.zeros(len(flat), np.int32) if token_ids is None else token_ids.astype(np.int32)
    return StepBatch(
        key=ShapeKey("eager", len(flat) + padding, len(lengths)),
        rows=np.arange(len(lengths), dtype=np.int32),
        token_ids=np.concatenate([ids, np.zeros(padding, np.int32)]),
        positions=np.concatenate([flat, np.zeros(padding, np.int32)]),
        query_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        seq_lens=np.array([p[-1] + 1 if len(p) else 0 for p in positions], np.int32),
        block_tables=tuple(padded),
        slot_mapping=tuple(slots),
        logit_index=np.arange(len(flat), dtype=np.int32),
        logit_span=spans,
        num_drafts=np.zeros(len(lengths), np.int32),
    )


class Stepper:
    """A model with a paged cache whose rows get shuffled (or consecutive) blocks."""

    def __init__(
        self,
        model: CausalLM,
        rows: int,
        max_len: int,
        block_size: int = 16,
        seed: int = 0,
        shuffle: bool = True,
        stale: float = np.nan,
    ):
        self.model, self.block_size = model, block_size
        spec = model.spec
        self.groups = kv_groups(spec)
        self.group_of = {layer: g for g, group in enumerate(self.groups) for layer in group.layers}
        per_row = -(-max_len // block_size)
        num_blocks = rows * per_row + 3
        rng = np.random.default_rng(seed)
        self.tables = []
        for _ in self.groups:
            ids = rng.permutation(num_blocks) if shuffle else np.arange(num_blocks)
            self.tables.append([ids[row * per_row : (row + 1) * per_row] for row in range(rows)])
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        full = [np.full(shape, stale, np.float32) for _ in range(2 * spec.num_layers)]
        self.caches = list(zip(full[::2], full[1::2], strict=True))
        self.backend = ReferenceAttention(block_size)
        self.lengths = [0] * rows

    def step(self, tokens: dict[int, Sequence[int]], padding: int = 0) -> dict[int, np.ndarray]:
        """Run `tokens`[row] at the end of each row, in the dict's order; logits [n, V] of each row's tokens."""
        positions = [np.arange(self.lengths[row], self.lengths[row] + len(ids)) for row, ids in tokens.items()]
        tables = [[table[row] for row in tokens] for table in self.tables]
        flat = np.concatenate([np.asarray(ids) for ids in tokens.values()])
        batch = make_batch(positions, tables, self.block_size, flat, padding)
        metas = [self.backend.plan(batch, g, group) for g, group in enumerate(self.groups)]

        def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
            meta = metas[self.group_of[layer]]
            return self.backend.run(q, k, v, self.caches[layer], meta, self.model.attention_layers[layer])

        hidden = self.model.forward(batch.token_ids, batch.positions, attend)
        logits = self.model.logits(hidden[batch.logit_index])
        for row, ids in tokens.items():
            self.lengths[row] += len(ids)
        return {row: logits[batch.logit_span == i] for i, row in enumerate(tokens)}

    def chunks(self, row: int, ids: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
        """Run `ids` alone on `row` in chunks of `sizes`, the rest token by token; logits [len(ids), V]."""
        results, start = [], 0
        for size in [*sizes, *[1] * (len(ids) - sum(sizes))]:
            results.append(self.step({row: ids[start : start + size]})[row])
            start += size
        return np.concatenate(results)
