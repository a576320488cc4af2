"""Inputs of a step from the request table, on the device where the table lives."""

from __future__ import annotations

from headrace.ops.registry import op
from headrace.ops.xp import Array, namespace


@op
def build_step(
    rows: Array,
    lengths: Array,
    num_tokens: int,
    table_tokens: Array,
    table_computed: Array,
    table_blocks: tuple[Array, ...],
    block_size: int,
) -> tuple[Array, Array, Array, Array, tuple[Array, ...]]:
    """(token_ids [T], positions [T], query_start [R+1], seq_lens [R], slot_mapping G x [T]), all int32.

    Span r covers `lengths[r]` tokens of row `rows[r]`, from what the table says is computed: with several steps in
    flight only the table knows. `num_tokens` is the sum of lengths (known on the host), `table_tokens` int32
    [max rows, max length], `table_blocks` G x int32 [max rows, max blocks].
    """
    xp = namespace(rows)
    count = rows.shape[0]
    starts = xp.take(table_computed, rows, axis=0)
    if num_tokens == count:  # one token each: a plain decode step
        row_of, positions = rows, starts
        query_start = xp.arange(count + 1, dtype=xp.int32)
    elif count == 1:
        row_of, positions = rows, starts + xp.arange(num_tokens, dtype=xp.int32)
        query_start = xp.asarray([0, num_tokens], dtype=xp.int32)
    else:
        query_start = xp.zeros(count + 1, dtype=xp.int32)
        query_start[1:] = xp.cumulative_sum(lengths)
        row_of = xp.repeat(rows, lengths)
        positions = xp.arange(num_tokens, dtype=xp.int32) + xp.repeat(starts - query_start[:-1], lengths)
    token_ids = table_tokens[row_of, positions]
    block = positions // block_size
    inside = positions - block * block_size
    slots = tuple(table[row_of, block] * block_size + inside for table in table_blocks)
    return token_ids, positions, query_start, starts + lengths, slots
