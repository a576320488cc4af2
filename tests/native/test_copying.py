"""Copies as native calls: the bits of the references, and replayed with what their inputs hold then."""

import numpy as np
import pytest

from headrace import ops
from headrace.ops.native.library import available, library
from headrace.ops.native.recording import record
from headrace.ops.registry import using

pytestmark = pytest.mark.skipif(not available(), reason="the native library is not built")


def test_copies_are_those_of_the_references():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 7)).astype(np.float32)
    y = rng.standard_normal((5, 20)).astype(np.float32)[:, 3:14]  # a view, whose tokens lie apart
    with using("native"):
        assert ops.joined.bound == ops.copied.bound == "native"
        assert np.array_equal(ops.joined(x, y), ops.joined.reference(x, y))
        copy = ops.copied(y)
        assert np.array_equal(copy, y) and not np.shares_memory(copy, y)
        assert np.array_equal(ops.copied(x.astype(np.float64)), x)


def test_a_recorded_pass_may_give_several_arrays():
    x, y = np.ones((2, 4), np.float32), np.full((2, 3), 2.0, np.float32)
    with using("native"):
        (copy, both), recording = record(library().functions, lambda: (ops.copied(x), ops.joined(x, y)))
        x[:] = 5.0
        recording.replay()
    assert np.array_equal(copy, x) and np.array_equal(both, np.concatenate([x, y], 1))


def test_a_result_that_no_call_made_is_not_recorded():
    x = np.ones((2, 4), np.float32)
    with using("native"):
        _, recording = record(library().functions, lambda: (ops.copied(x), x + 1))
    assert recording is None
