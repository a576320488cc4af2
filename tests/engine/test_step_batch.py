"""A step of plain decodes is built by a way of its own: its arrays are those of the general one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace import ops
from headrace.core.plan import StepPlan
from headrace.worker.batch import BatchBuilder, ShapeKey
from headrace.worker.table import RequestTable

BLOCK = 4


@pytest.mark.parametrize("count", [1, 3, 17, 300])
@pytest.mark.parametrize("groups", [1, 2])
def test_arrays_of_plain_decodes(count: int, groups: int) -> None:
    rng = np.random.default_rng(count)
    table = RequestTable(320, 64, groups, BLOCK)
    table.token_ids[:] = rng.integers(0, 1000, table.token_ids.shape)
    table.num_computed[:] = rng.integers(0, 60, 320)
    for blocks in table.block_tables:
        blocks[:] = rng.integers(0, 5000, blocks.shape)
    spans = np.ones((4, count), np.int32)
    spans[0], spans[3] = rng.permutation(320)[:count], 0
    spans[1] = table.num_computed[spans[0]]
    plan, builder = StepPlan(1, spans=spans, yields=np.ones(count, bool)), BatchBuilder(table, BLOCK)
    assert plan.num_decodes == count
    batch = builder.build(plan, ShapeKey("eager", count, count))
    token_ids, positions, query_start, seq_lens, slots = ops.build_step(
        plan.rows, plan.lengths, count, table.token_ids, table.num_computed, table.block_tables, BLOCK
    )
    wide = -(-int(seq_lens.max()) // BLOCK)
    expected: dict[str, Any] = {
        "token_ids": token_ids,
        "positions": positions,
        "query_start": query_start,
        "seq_lens": seq_lens,
        "logit_index": np.arange(count),
        "logit_span": np.arange(count),
        "rows": plan.rows,
        "num_drafts": np.zeros(count),
    }
    for name, values in expected.items():
        found = getattr(batch, name)
        assert found.dtype == np.int32, name
        np.testing.assert_array_equal(found, values, name)
    for group in range(groups):
        np.testing.assert_array_equal(batch.slot_mapping[group], slots[group])
        np.testing.assert_array_equal(batch.block_tables[group], table.block_tables[group][plan.rows, :wide])
        assert batch.slot_mapping[group].dtype == np.int32
    assert batch.parents is None and not len(batch.prompt_index)
