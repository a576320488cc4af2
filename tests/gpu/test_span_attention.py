"""Attention of short spans, chains and trees, against its definition in float32."""

import numpy as np
import pytest
import torch

from headrace.ops.triton import paged, prefill, spans

PAGE, ROWS = 16, [3, 0, 7, 2, 5, 1]
LENGTHS, QUERIES = [1, 70, 400, 33, 129, 16], [1, 5, 16, 2, 9, 16]
SHAPES = [
    pytest.param(4, 2, 32, 0, None, False, id="grouped"),
    pytest.param(9, 3, 64, 0, None, False, id="three heads a key"),
    pytest.param(4, 1, 80, 100, None, True, id="window and sinks"),
    pytest.param(4, 2, 32, 5, None, False, id="a window within the span"),
    pytest.param(4, 4, 32, 0, 5.0, False, id="soft cap"),
    pytest.param(16, 1, 32, 0, None, False, id="several tiles a span"),
]


def i32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def random_parents(count, numbers):
    """Of each node the place of the one before it, -1 of the first."""
    return [-1, *(int(numbers.integers(0, node)) for node in range(1, count))]


class Spans:
    """Pages, tables, spans of which each is a chain or a tree, and what attention over them is."""

    def __init__(self, heads, kv_heads, dim, window, cap, sinks, random, dtype, device, trees=(), seed=1):
        numbers = np.random.default_rng(seed)
        self.shape = paged.HeadShape(heads, kv_heads, dim)
        self.cache = (random(80, kv_heads, PAGE, dim).to(dtype), random(80, kv_heads, PAGE, dim).to(dtype))
        order, table, taken = numbers.permutation(80).astype(np.int32), np.zeros((8, 28), np.int32), 0
        for row, length in zip(ROWS, LENGTHS, strict=True):
            count = -(-length // PAGE)
            table[row, :count] = order[taken : taken + count]
            taken += count
        starts = [0, *np.cumsum(QUERIES).tolist()]
        self.q = random(starts[-1], heads * dim).to(dtype)
        self.scores = paged.Scores(dim**-0.5, cap, window, random(heads) if sinks else None)
        tensors = [i32(each, device) for each in (ROWS, starts, LENGTHS, [len(ROWS)])]
        self.paged = paged.PagedRows(torch.from_numpy(table).to(device), *tensors)
        self.out = torch.full_like(self.q, 7.0)
        self.want = torch.zeros(self.q.shape, device=device)
        masks, positions = [], []
        for span, (row, length, queries) in enumerate(zip(ROWS, LENGTHS, QUERIES, strict=True)):
            parents = random_parents(queries, numbers) if span in trees else list(range(-1, queries - 1))
            root, paths = length - queries, []
            for node in range(queries):
                paths.append([*(paths[parents[node]] if node else []), node])
            masks += [sum(1 << each for each in path) for path in paths]
            positions += [root + len(path) - 1 for path in paths]
            blocks = torch.from_numpy(table[row, : -(-length // PAGE)].astype(np.int64)).to(device)
            keys, values = (
                pages[blocks].transpose(1, 2).reshape(-1, kv_heads, dim)[:length].float() for pages in self.cache
            )
            keys, values = (each.repeat_interleave(heads // kv_heads, 1) for each in (keys, values))
            for node, path in enumerate(paths):
                seen = [*range(root), *(root + each for each in path)]
                seen = seen[-window:] if window else seen  # by depth, as positions are
                token = starts[span] + node
                score = torch.einsum("hd,khd->hk", self.q[token].view(heads, dim).float(), keys[seen]) * dim**-0.5
                score = score if cap is None else cap * torch.tanh(score / cap)
                if sinks:
                    score = torch.cat([score, self.scores.sinks[:, None]], -1)
                weight = torch.softmax(score, -1)[:, : len(seen)]
                self.want[token] = torch.einsum("hk,khd->hd", weight, values[seen]).reshape(-1)
        bits = torch.from_numpy(np.array(masks, np.uint64).view(np.int64)).to(device)
        self.tree = bits, i32(positions, device)

    def run(self, space, tree=None):
        spans.plan_spans(self.paged, self.shape, self.scores.window, space)
        spans.span_attention(self.q, self.cache, self.paged, self.shape, self.scores, space, self.out, tree)
        return self.out


def close(got, want, tolerance):
    return torch.allclose(got.float(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "cap", "sinks"), SHAPES)
def test_ragged_spans(heads, kv_heads, dim, window, cap, sinks, random, dtype, tolerance, device):
    case = Spans(heads, kv_heads, dim, window, cap, sinks, random, dtype, device)
    space = spans.SpanSpace.create(8, 16, case.shape, device)
    assert close(case.run(space), case.want, tolerance)
    assert int(space.counts) > len(ROWS) or 0 < window <= spans.LEAST, "no context was cut"
    assert int(space.spans[: len(ROWS), 3].sum()) <= space.outputs.shape[0]
    first = case.out.clone()
    assert torch.equal(case.run(space), first)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "cap", "sinks"), SHAPES)
def test_trees_beside_chains(heads, kv_heads, dim, window, cap, sinks, random, dtype, tolerance, device):
    case = Spans(heads, kv_heads, dim, window, cap, sinks, random, dtype, device, trees=(1, 2, 4, 5))
    space = spans.SpanSpace.create(8, 16, case.shape, device)
    assert close(case.run(space, case.tree), case.want, tolerance)


def test_a_mask_of_a_chain_is_what_no_mask_is(random, dtype, device):
    case = Spans(4, 2, 32, 0, None, False, random, dtype, device)
    space = spans.SpanSpace.create(8, 16, case.shape, device)
    plain = case.run(space).clone()
    assert torch.equal(case.run(space, case.tree), plain)


def test_a_tree_of_64_nodes(random, dtype, tolerance, device, monkeypatch):
    monkeypatch.setitem(globals(), "QUERIES", [1, 64, 64, 2, 9, 16])
    case = Spans(4, 2, 32, 0, None, False, random, dtype, device, trees=(1, 2, 5))
    space = spans.SpanSpace.create(8, 64, case.shape, device)
    assert close(case.run(space, case.tree), case.want, tolerance)


def test_spans_of_padding_are_left_alone(random, dtype, tolerance, device):
    case = Spans(4, 2, 32, 0, None, False, random, dtype, device)
    case.paged.num_rows.fill_(3)
    space = spans.SpanSpace.create(8, 16, case.shape, device)
    case.run(space)
    real = sum(QUERIES[:3])
    assert close(case.out[:real], case.want[:real], tolerance) and bool((case.out[real:] == 7.0).all())


def test_spans_agree_with_prefill(random, dtype, tolerance, device):
    case = Spans(9, 3, 64, 0, None, False, random, dtype, device)
    size = prefill.prefill_tile(case.shape)
    tiles = [(span, first) for span, count in enumerate(QUERIES) for first in range(0, count, size)]
    want = torch.zeros_like(case.q)
    given = tuple(i32(list(each), device) for each in zip(*tiles, strict=True))
    prefill.prefill_attention(case.q, case.cache, case.paged, given, case.shape, case.scores, want)
    space = spans.SpanSpace.create(8, 16, case.shape, device)
    assert close(case.run(space), want.float(), tolerance)


def test_parts_have_room_whatever_the_lengths(device):
    """Contexts in several items have fewer than twice the items that a step is cut into."""
    shape, numbers = paged.HeadShape(4, 2, 32), np.random.default_rng(0)
    space = spans.SpanSpace.create(32, 16, shape, device)
    for trial in range(20):
        count = int(numbers.integers(1, 33))
        lengths = numbers.integers(16, 20000 if trial % 2 else 300, count)
        rows = paged.PagedRows(
            torch.zeros((32, 1), dtype=torch.int32, device=device), i32(range(count), device),
            i32(range(0, 16 * count + 1, 16), device), i32(lengths.tolist(), device), i32([count], device),
        )  # fmt: skip
        spans.plan_spans(rows, shape, 0, space)
        records, parts = space.items[: int(space.counts)].cpu().numpy(), space.spans[:count].cpu().numpy()
        assert len(records) <= space.items.shape[0] and parts[:, 3].sum() <= space.outputs.shape[0]
        split = records[records[:, 6] > 1]
        assert (np.sort(split[:, 8]) == np.arange(parts[:, 3].sum())).all()
        for row in range(count):
            own = records[records[:, 0] == row]
            assert own[0, 3] == 0 and own[-1, 4] == lengths[row] and (own[1:, 3] == own[:-1, 4]).all()


def test_spans_too_long_for_a_mask_are_refused(device):
    with pytest.raises(ValueError, match="give 1 to 64"):
        spans.SpanSpace.create(4, 65, paged.HeadShape(4, 2, 32), device)
