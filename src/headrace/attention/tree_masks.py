"""What attention on a GPU is told of token trees: for each token of a step a mask of those in its span that it sees."""

from __future__ import annotations

import numpy as np

MOST_NODES = 64  # of a span: bits of a mask


def ancestor_masks(parents: np.ndarray, query_start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(masks int64 [T], depths int32 [T]) of a step whose spans are token trees or chains.

    `parents` int32 [T] as StepBatch has them: the place in its span of the token before, -1 of a tree's first, -2 of
    all tokens of other spans, which are chains; `query_start` int32 [R + 1]. Bit i of a mask is set where the token
    sees token i of its span, itself included. A token's position is that of its span's first one plus its depth.
    Raises ValueError where a tree has more than 64 nodes or a node comes before its parent. Chains may be longer; bits
    beyond the 64th are missing in their masks, and only the kernel for prompts may serve them.
    """
    count = len(parents)
    masks, depths = np.zeros(count, np.uint64), np.zeros(count, np.int32)
    lengths = np.diff(query_start)
    place = np.arange(count) - np.repeat(query_start[:-1], lengths)
    chains = parents == -2
    depths[chains] = place[chains]
    masks[chains] = np.uint64(2**64 - 1) >> (63 - np.minimum(place[chains], 63)).astype(np.uint64)
    for first in np.flatnonzero(parents == -1).tolist():
        span = int(np.searchsorted(query_start, first, side="right")) - 1
        own = parents[first : int(query_start[span + 1])].tolist()
        if len(own) > MOST_NODES:
            raise ValueError(f"a token tree of {len(own)} nodes; give at most {MOST_NODES}")
        masks[first] = 1
        for node, parent in enumerate(own[1:], 1):
            if not 0 <= parent < node:
                raise ValueError(f"node {node} of a token tree comes before its parent {parent}")
            masks[first + node] = masks[first + parent] | np.uint64(1 << node)
            depths[first + node] = depths[first + parent] + 1
    return masks.view(np.int64), depths
