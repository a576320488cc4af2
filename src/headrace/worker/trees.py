"""What a runner does about token trees: how their logits hang together, and what of them is kept.

The keys and values of a tree lie in the order of its nodes. Once verified, those of the accepted path are moved behind
the known tokens, as a chain would have left them; the rest is overwritten by what comes.
"""

from __future__ import annotations

import numpy as np

from headrace.attention.base import AttentionBackend
from headrace.sampling.state import TreeRows
from headrace.worker.batch import StepBatch
from headrace.worker.kv_cache import KVCache


def tree_rows(batch: StepBatch) -> TreeRows | None:
    """Of the batch's rows of logits; None if no span is a tree. Spans of trees have logits of every token."""
    if batch.parents is None:
        return None
    parents = batch.parents[batch.logit_index]
    first = np.searchsorted(batch.logit_span, batch.logit_span)
    rows = np.where(parents >= 0, parents + first, parents).astype(np.int32)
    return TreeRows(rows, np.asarray(batch.token_ids)[batch.logit_index])


def keep_paths(
    batch: StepBatch, taken: np.ndarray, cache: KVCache, backend: AttentionBackend, num_layers: int
) -> np.ndarray | None:
    """Move what the step wrote for accepted nodes to where their positions are. `taken` bool [L] as Sampled has it.

    Returns int64 [T]: which of the step's tokens stands in each token's place now; None: nothing has moved.
    """
    assert batch.parents is not None
    order = np.arange(batch.num_tokens)
    kept = np.zeros(batch.num_tokens, bool)
    kept[batch.logit_index[taken]] = True
    for first in np.flatnonzero(batch.parents == -1).tolist():
        end = int(batch.query_start[np.searchsorted(batch.query_start, first, side="right")])
        path = first + np.flatnonzero(kept[first:end])
        order[first : first + len(path)] = path
    moved = np.flatnonzero(order != np.arange(batch.num_tokens))
    if not len(moved):
        return None
    slots = [(np.asarray(each)[order[moved]], np.asarray(each)[moved]) for each in batch.slot_mapping]
    for layer in range(num_layers):
        sources, destinations = slots[cache.group(layer)]
        backend.move(cache.pages(layer), sources, destinations)
    return order
