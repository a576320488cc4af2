"""The analytic counts against loops that count one by one."""

from __future__ import annotations

import numpy as np
import pytest
from ledger_cases import spans, spec

from headrace.core.kv_layout import KVGroup, KVLayout
from headrace.core.plan import StepPlan
from headrace.ledger.work import StepWork, WorkModel, expert_params, linear_params, num_logits, stored_params
from headrace.models.spec import ModelSpec, MoESpec

MODELS = {
    "full": spec(),
    "window": spec(windows=(5,) * 4),
    "mixed": spec(windows=(None, 5, None, 9)),
    "one": spec(windows=(1, None, None, None)),
    "tied": spec(tie_word_embeddings=True),
}


def count(model: ModelSpec, columns: list[tuple[int, int]]) -> tuple[int, int, int]:
    """(attention FLOP, tokens of KV read, tokens written), layer by layer, query by query, key by key."""
    flops = read = written = 0
    for layer in range(model.num_layers):
        window = model.window(layer)
        for start, length in columns:
            seen = set()
            for query in range(start, start + length):
                for key in range(query + 1):
                    if window is None or query - key < window:
                        seen.add(key)
                        # multiply-adds of the score and of the weighted value, over the head's dimensions
                        flops += 2 * 2 * model.head_dim * model.num_heads
            read += len(seen)
            written += length
    return flops, read, written


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "columns", [[(0, 1)], [(0, 7)], [(3, 4), (40, 1)], [(0, 20), (4, 1), (5, 1), (8, 3), (30, 12)]]
)
def test_matches_brute_force(name: str, columns: list[tuple[int, int]]) -> None:
    model = MODELS[name]
    work = WorkModel(model, 1_000_000, kv_bytes_per_token_layer=10.0).work(spans(*columns), 2)
    flops, read, written = count(model, columns)
    tokens = sum(length for _, length in columns)
    assert work.flops_attention == flops
    assert work.bytes_kv_read == 10 * read
    assert work.bytes_kv_write == 10 * written
    assert work.num_tokens == tokens and work.num_spans == len(columns) and work.num_logits == 2
    assert work.flops_head == 2 * 2 * model.vocab_size * model.hidden_size


def test_linear_flops_are_those_of_the_matrices() -> None:
    model = spec()
    hidden, inner = model.hidden_size, model.intermediate_size
    shapes = [(hidden, model.q_size), (hidden, model.kv_size), (hidden, model.kv_size), (model.q_size, hidden)]
    shapes += [(hidden, inner), (hidden, inner), (inner, hidden)]
    params = model.num_layers * sum(a * b for a, b in shapes)
    assert linear_params(model) == params
    assert WorkModel(model, 0).work(spans((0, 5), (9, 1)), 0).flops_linear == 2 * params * 6
    activations = 4 * model.num_layers * (sum(a + b for a, b in shapes) - 2 * hidden - hidden)  # QKV, gate/up read once
    assert WorkModel(model, 0).work(spans((0, 1)), 0).bytes_activations == activations


@pytest.mark.parametrize("tied", [True, False])
def test_weights_read(tied: bool) -> None:
    model = spec(tie_word_embeddings=tied)
    table = model.vocab_size * model.hidden_size
    total = 2 * (linear_params(model) + table * (1 if tied else 2))  # two bytes a parameter
    counter = WorkModel(model, total)
    assert counter.head_bytes == 2 * table and counter.embedding_bytes == (0 if tied else 2 * table)
    row = 0 if tied else 2 * model.hidden_size
    assert counter.work(spans((0, 3)), 1).bytes_weights == pytest.approx(2 * (linear_params(model) + table) + 3 * row)
    assert counter.work(spans((0, 3)), 0).bytes_weights == pytest.approx(2 * linear_params(model) + 3 * row)
    given = WorkModel(model, 1000, head_bytes=100, embedding_bytes=0)
    assert given.work(spans((0, 3)), 0).bytes_weights == 900
    with pytest.raises(ValueError, match="negative"):
        WorkModel(model, -1)


def test_layout_plan_and_empty_step() -> None:
    model = spec()
    layout = KVLayout((KVGroup((0, 1, 2, 3), 2, 8),), block_size=16, num_blocks=4, bytes_per_element=2)
    counter = WorkModel.for_layout(model, 1000, layout)
    assert counter.kv_bytes_per_token_layer == 2 * 2 * 8 * 2
    columns = spans((0, 6), (10, 3), (7, 1))
    columns[3] = (0, 2, 0)
    plan = StepPlan(step_id=0, spans=columns, yields=np.array([False, True, True]))
    assert num_logits(plan) == 3 + 1
    assert counter.of_plan(plan) == counter.work(columns, 4)
    assert counter.of_plan(StepPlan(step_id=1)) == StepWork()
    total = counter.of_plan(plan)
    assert total.bytes_total == total.bytes_weights + total.bytes_kv_read + total.bytes_kv_write
    assert total.flops_total == total.flops_linear + total.flops_attention + total.flops_head


def test_large_counts_do_not_overflow() -> None:
    big = spans(*[(100_000, 8192)] * 64)
    work = WorkModel(spec(), 1).work(big, 0)
    pairs = 64 * (8192 * 100_000 + 8192 * 8193 // 2)
    assert work.flops_attention == 4 * pairs * 4 * 4 * 8


def test_experts_count_where_a_token_goes() -> None:
    moe = MoESpec(num_experts=8, experts_per_token=2, intermediate_size=10, dense_layers=frozenset({1}))
    model = spec(moe=moe, tie_word_embeddings=True)
    hidden, inner = model.hidden_size, model.intermediate_size
    attention = hidden * (model.q_size + 2 * model.kv_size) + model.q_size * hidden
    expert, outside = 3 * hidden * 10, 4 * attention + 3 * hidden * inner + 3 * hidden * 8
    assert linear_params(model) == outside + 3 * 2 * expert
    assert expert_params(model) == 3 * 8 * expert and stored_params(model) == outside + 3 * 8 * expert
    counter = WorkModel(model, 4 * (stored_params(model) + model.vocab_size * hidden))
    assert counter.work(spans((0, 5)), 0).flops_linear == 2 * linear_params(model) * 5
    # one token touches the experts it is sent to, many touch them all, a few some
    assert counter.work(spans((0, 1)), 0).bytes_weights == pytest.approx(4 * linear_params(model))
    assert counter.work(spans((0, 500)), 0).bytes_weights == pytest.approx(4 * stored_params(model))
    touched = 1 - (6 / 8) ** 3
    expected = 4 * (outside + touched * expert_params(model))
    assert counter.work(spans((0, 2), (7, 1)), 0).bytes_weights == pytest.approx(expected)
