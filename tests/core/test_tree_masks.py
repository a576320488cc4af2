"""Masks of ancestors of token trees, beside chains."""

from itertools import pairwise

import numpy as np
import pytest

from headrace.attention.tree_masks import ancestor_masks


def walked(parents, starts):
    """The same, one step up at a time."""
    masks, depths = [], []
    for start, end in pairwise(starts):
        for node in range(end - start):
            seen, at = [], node
            while at >= 0:
                seen.append(at)
                above = parents[start + at]
                at = at - 1 if above == -2 else above
            masks.append(sum(1 << each for each in seen))
            depths.append(len(seen) - 1)
    return masks, depths


def test_trees_beside_chains():
    numbers, parents, starts = np.random.default_rng(3), [], [0]
    for span, count in enumerate([1, 7, 64, 3, 64, 20]):
        tree = [-1, *(int(numbers.integers(0, node)) for node in range(1, count))]
        parents += tree if span % 2 else [-2] * count
        starts.append(starts[-1] + count)
    masks, depths = ancestor_masks(np.array(parents, np.int32), np.array(starts, np.int32))
    want, deep = walked(parents, starts)
    assert masks.view(np.uint64).tolist() == want and depths.tolist() == deep
    assert masks.dtype == np.int64 and depths.dtype == np.int32


def test_what_is_no_tree_is_refused():
    with pytest.raises(ValueError, match="65 nodes; give at most 64"):
        ancestor_masks(np.array([-1, *range(64)], np.int32), np.array([0, 65], np.int32))
    with pytest.raises(ValueError, match="node 1 of a token tree comes before its parent 2"):
        ancestor_masks(np.array([-1, 2, 0], np.int32), np.array([0, 3], np.int32))
