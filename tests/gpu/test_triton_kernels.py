"""Triton kernels against what they are defined to be, written with torch in float32."""

import math

import numpy as np
import pytest
import torch

from headrace.ops.triton import decode, norm, paged, pointwise, prefill, rotate, skinny


def close(got, want, tolerance):
    return torch.allclose(got.float(), want, atol=tolerance, rtol=tolerance)


def rms(x, weight, eps=1e-5):
    return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def i32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_norm_behind_a_sum(tokens, random, dtype, tolerance):
    x, residual, weight = random(tokens, 96).to(dtype), random(tokens, 96), random(96)
    total = residual + x.float()
    got, kept = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert kept is residual and close(kept, total, 1e-6)
    assert got.dtype == dtype and close(got, rms(total, weight), tolerance)


def test_norm_adds_up_the_parts_of_a_split_product(random, dtype, tolerance):
    parts, residual, weight = random(3, 4, 100), random(4, 100), random(100)
    total = residual + parts.sum(0)
    got, kept = norm.add_rms_norm(parts, residual, weight, 1e-5)
    assert close(kept, total, 1e-5) and close(got, rms(total, weight), tolerance)


def test_norm_of_heads_in_place(random, dtype, tolerance):
    qkv, weight = random(4, 8 * 32).to(dtype), random(32)
    heads = qkv[:, 32:128].reshape(4, 3, 32)  # a view
    want, others = rms(heads.float(), weight), qkv[:, 128:].clone()
    norm.rms_norm(heads, weight, 1e-5, out=heads)
    assert close(qkv[:, 32:128].reshape(4, 3, 32), want, tolerance) and torch.equal(qkv[:, 128:], others)


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("silu_mul", torch.nn.functional.silu),
        ("gelu_mul", torch.nn.functional.gelu),
        ("gelu_tanh_mul", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_gated_activations(name, activation, random, dtype, tolerance):
    x = (random(3, 2 * 200) * 3).to(dtype)
    want = activation(x[:, :200].float()) * x[:, 200:].float()
    assert close(getattr(pointwise, name)(x), want, tolerance)


def test_embedding(random, dtype, device):
    weight = random(50, 70).to(dtype)
    ids = i32([3, 49, 0], device)
    assert torch.equal(pointwise.embedding_rows(ids, weight), weight[ids.long()].float())


@pytest.mark.parametrize(("tokens", "rows", "inner"), [(1, 96, 576), (5, 100, 192), (33, 64, 100), (64, 130, 64)])
def test_products_of_few_tokens(tokens, rows, inner, random, dtype, tolerance):
    x, weight, bias = random(tokens, inner).to(dtype), (random(rows, inner) / inner**0.5).to(dtype), random(rows)
    want = x.float() @ weight.float().T
    assert close(skinny.skinny_linear(x, weight, None, torch.float32, False), want, tolerance)
    got = skinny.skinny_linear(x, weight, bias, torch.float32, True)
    assert close(got.sum(0) if got.ndim == 3 else got, want + bias, tolerance)


@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_product(bias, random, dtype, tolerance):
    x, weight, added = random(7, 192).to(dtype), (random(200, 192) / 14).to(dtype), random(200)
    merged = x.float() @ weight.float().T + (added if bias else 0)
    want = torch.nn.functional.silu(merged[:, :100]) * merged[:, 100:]
    assert close(skinny.skinny_gated(x, weight, added if bias else None, pointwise.SILU), want, tolerance)


@pytest.mark.parametrize(("rotary", "normed", "parts"), [(32, False, 1), (20, False, 1), (32, True, 2)])
def test_rotation_norms_and_writing(rotary, normed, parts, random, dtype, tolerance, device):
    shape, tokens, page = paged.HeadShape(4, 2, 32), 5, 16
    qkv = random(parts, tokens, 8 * 32)
    qkv = qkv if parts > 1 else qkv[0].to(dtype)
    cos, sin = random(tokens, rotary // 2), random(tokens, rotary // 2)
    q_norm, k_norm = random(32), random(32)
    keys, values = torch.zeros(6, 2, page, 32, device=device).to(dtype), torch.zeros(6, 2, page, 32, device=device)
    values = values.to(dtype)
    slots = i32([17, 80, 3, -1, 33], device)
    kept = torch.zeros(tokens, 64, device=device).to(dtype)
    norms = rotate.HeadNorms(q_norm, k_norm, 1e-5) if normed else None
    q = torch.zeros(tokens, 128, device=device).to(dtype)
    rotate.rotate_and_write(qkv, shape, cos, sin, (keys, values), slots, q, norms, kept)
    heads = (qkv.sum(0) if parts > 1 else qkv.float()).view(tokens, 8, 32)
    rotated = heads[:, :6].clone()
    if normed:
        rotated = torch.cat([rms(rotated[:, :4], q_norm), rms(rotated[:, 4:], k_norm)], dim=1)
    low, high, half = rotated[..., : rotary // 2].clone(), rotated[..., rotary // 2 : rotary].clone(), rotary // 2
    rotated[..., :half] = low * cos[:, None] - high * sin[:, None]
    rotated[..., half:rotary] = high * cos[:, None] + low * sin[:, None]
    assert close(q.view(tokens, 4, 32), rotated[:, :4], tolerance)
    assert close(kept.view(tokens, 2, 32), rotated[:, 4:], tolerance)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert close(keys[slot // page, :, slot % page], rotated[token, 4:], tolerance)
            assert close(values[slot // page, :, slot % page], heads[token, 6:], tolerance)
    assert int((keys.float().abs().sum(-1) > 0).sum()) == 4 * 2, "padding was written"


@pytest.mark.parametrize(
    "page", [pytest.param(16, marks=pytest.mark.slow), 24, pytest.param(128, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("window", [0, 100])
def test_slots_cover_every_key_once(page, window, device):
    shape, numbers = paged.HeadShape(4, 2, 32), np.random.default_rng(page)
    space = decode.DecodeSpace.create(32, shape, page, torch.float32, device, 3000)
    tile, unit = decode.decode_tile(1, 32, 4), math.gcd(decode.decode_tile(1, 32, 4).step, page)
    for trial in range(6):
        count = int(numbers.integers(1, 33))
        lengths = numbers.integers(1, 3000 if trial % 2 else 70, count).tolist()
        table = torch.from_numpy(numbers.permutation(32 * 200).astype(np.int32)).view(32, 200).to(device)
        rows = paged.PagedRows(
            table, i32(range(count), device), i32(range(count + 1), device), i32(lengths, device), i32([count], device)
        )
        for fused in (False, True):
            decode.plan_decode(rows, shape, window, space, page, fused)
            slots = space.slots[: int(space.counts)].cpu().numpy()
            items = space.items.cpu().numpy()
            assert slots[0, 0] == 0 and (slots[1:, 0] == slots[:-1, 1]).all()
            assert int(items[items[:, 6] > 1, 7].max(initial=-1)) < space.outputs.shape[0]
            seen = [[] for _ in lengths]
            for first, last, item in slots:
                step = first
                while step < last:
                    row, _, _, steps, hidden, *_ = items[item].tolist()
                    for at in range(step, step + steps):
                        start = at * (tile.step // unit)
                        for index, packed in enumerate(space.units[start : start + tile.step // unit].tolist()):
                            number, valid = packed // (2 * unit), packed % (2 * unit)
                            keys = [number * unit + key for key in range(valid)]
                            seen[row] += keys[max(0, hidden - index * unit) :] if at == step else keys
                    step, item = step + steps, item + 1
            for row, length in enumerate(lengths):
                keys = range(max(0, length - window) if window else 0, length - fused)
                assert seen[row] == [int(table[row, key // page]) * page + key % page for key in keys]


LENGTHS, ROWS, PAGE = [1, 70, 200, 33, 129], [3, 0, 7, 2, 5], 16
SHAPES = [
    pytest.param(4, 2, 32, 0, None, False, id="grouped"),
    pytest.param(9, 3, 64, 0, None, False, id="three heads a key"),
    pytest.param(4, 1, 80, 20, None, True, id="window and sinks"),
    pytest.param(4, 4, 32, 0, 5.0, False, id="soft cap"),
]


class Case:
    """Pages, tables and what attention over them is."""

    def __init__(self, heads, kv_heads, dim, window, cap, sinks, query_lens, random, dtype, device):
        self.shape = paged.HeadShape(heads, kv_heads, dim)
        num_blocks = 80
        self.cache = (
            random(num_blocks, kv_heads, PAGE, dim).to(dtype),
            random(num_blocks, kv_heads, PAGE, dim).to(dtype),
        )
        order = np.random.default_rng(1).permutation(num_blocks).astype(np.int32)
        table, taken = np.zeros((8, 20), np.int32), 0
        for row, length in zip(ROWS, LENGTHS, strict=True):
            count = -(-length // PAGE)
            table[row, :count] = order[taken : taken + count]
            taken += count
        starts = [0, *np.cumsum(query_lens).tolist()]
        self.q = random(starts[-1], heads * dim).to(dtype)
        self.scores = paged.Scores(dim**-0.5, cap, window, random(heads) if sinks else None)
        tensors = [i32(each, device) for each in (ROWS, starts, LENGTHS, [len(ROWS)])]
        self.paged = paged.PagedRows(torch.from_numpy(table).to(device), *tensors)
        self.out = torch.full_like(self.q, 7.0)
        self.want = torch.zeros(self.q.shape, device=device)
        for row, length, start, queries in zip(ROWS, LENGTHS, starts, query_lens, strict=False):
            blocks = torch.from_numpy(table[row, : -(-length // PAGE)].astype(np.int64)).to(device)
            keys, values = (
                pages[blocks].transpose(1, 2).reshape(-1, kv_heads, dim)[:length].float() for pages in self.cache
            )
            keys, values = (each.repeat_interleave(heads // kv_heads, 1) for each in (keys, values))
            q = self.q[start : start + queries].view(queries, heads, dim).float()
            score = torch.einsum("qhd,khd->hqk", q, keys) * dim**-0.5
            score = score if cap is None else cap * torch.tanh(score / cap)
            position = torch.arange(length - queries, length, device=device)[:, None]
            key = torch.arange(length, device=device)[None]
            hidden = (key > position) | ((key <= position - window) if window else False)
            score = score.masked_fill(hidden, float("-inf"))
            if sinks:
                extra = self.scores.sinks[:, None, None].expand(-1, queries, 1)
                weight = torch.softmax(torch.cat([score, extra], -1), -1)[..., :-1]
            else:
                weight = torch.softmax(score, -1)
            self.want[start : start + queries] = torch.einsum("hqk,khd->qhd", weight, values).reshape(queries, -1)


def projected(case, parts, random, dtype, device):
    """A projection whose rotated q and newest keys and values are those of `case`; the pages lose the newest ones."""
    shape, count = case.shape, len(ROWS)
    dim, half = shape.head_dim, shape.head_dim // 2 - 4  # some dimensions do not turn
    table = case.paged.block_tables
    newest = [
        (int(table[row, (length - 1) // PAGE]), (length - 1) % PAGE) for row, length in zip(ROWS, LENGTHS, strict=True)
    ]
    k, v = (torch.stack([pages[block, :, place] for block, place in newest]).float() for pages in case.cache)
    heads = torch.cat([case.q.view(count, -1, dim).float(), k], dim=1)
    angle = random(count, half)
    cos, sin = torch.cos(angle), torch.sin(angle)
    low, high = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
    heads[..., :half] = low * cos[:, None] + high * sin[:, None]  # turned back
    heads[..., half : 2 * half] = high * cos[:, None] - low * sin[:, None]
    qkv = torch.cat([heads, v], dim=1).reshape(count, -1)
    for pages in case.cache:
        for block, place in newest:
            pages[block, :, place] = float("nan")  # to be written, never read
    if parts > 1:
        pieces = random(parts, *qkv.shape)
        pieces[-1] += qkv - pieces.sum(0)
        return decode.Projected(pieces, cos, sin), newest, k, v
    return decode.Projected(qkv.to(dtype), cos, sin), newest, k, v


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "cap", "sinks"), SHAPES)
def test_decode_attention(heads, kv_heads, dim, window, cap, sinks, parts, random, dtype, tolerance, device):
    case = Case(heads, kv_heads, dim, window, cap, sinks, [1] * 5, random, dtype, device)
    given, newest, k, v = projected(case, parts, random, dtype, device)
    space = decode.DecodeSpace.create(8, case.shape, PAGE, dtype, device, 512)
    decode.plan_decode(case.paged, case.shape, window, space, PAGE, True)
    first = None
    for _ in range(2):  # counters are left as they were found; who is last does not show
        decode.decode_attention(given, case.cache, case.paged, case.shape, case.scores, space, case.out)
        assert close(case.out, case.want, 4 * tolerance)
        assert not space.arrived.any()
        assert first is None or torch.equal(first, case.out)
        first = case.out.clone()
    for pages, wanted in zip(case.cache, (k, v), strict=True):
        got = torch.stack([pages[block, :, place] for block, place in newest])
        assert close(got, wanted, 4 * tolerance)


def test_decode_attention_with_norms_of_heads(random, dtype, tolerance, device):
    case = Case(4, 2, 32, 0, None, False, [1] * 5, random, dtype, device)
    q_norm, k_norm, angle = random(32), random(32), random(5, 16)
    qkv = random(5, 8 * 32).to(dtype)
    norms = rotate.HeadNorms(q_norm, k_norm, 1e-5)
    # the same in two steps, which have tests of their own
    cache = tuple(pages.clone() for pages in case.cache)
    slots = [
        int(case.paged.block_tables[r, (n - 1) // PAGE]) * PAGE + (n - 1) % PAGE
        for r, n in zip(ROWS, LENGTHS, strict=True)
    ]
    cos, sin = torch.cos(angle), torch.sin(angle)
    q = torch.zeros_like(case.q)
    rotate.rotate_and_write(qkv, case.shape, cos, sin, cache, i32(slots, device), q, norms)
    tiles = i32(list(range(5)), device), i32([0] * 5, device)
    want = torch.zeros_like(case.q)
    prefill.prefill_attention(q, cache, case.paged, tiles, case.shape, case.scores, want)
    space = decode.DecodeSpace.create(8, case.shape, PAGE, dtype, device, 512)
    decode.plan_decode(case.paged, case.shape, 0, space, PAGE, True)
    given = decode.Projected(qkv, cos, sin, norms)
    decode.decode_attention(given, case.cache, case.paged, case.shape, case.scores, space, case.out)
    assert close(case.out, want.float(), tolerance)
    assert all(close(got, wanted.float(), tolerance) for got, wanted in zip(case.cache, cache, strict=True))


def test_decode_attention_of_queries_rotated_before(random, dtype, tolerance, device):
    case = Case(9, 3, 64, 0, None, False, [1] * 5, random, dtype, device)
    space = decode.DecodeSpace.create(8, case.shape, PAGE, dtype, device, 512)
    decode.plan_decode(case.paged, case.shape, 0, space, PAGE, False)
    decode.decode_attention(case.q, case.cache, case.paged, case.shape, case.scores, space, case.out)
    assert close(case.out, case.want, tolerance)


def test_padding_rows_are_left_alone(random, dtype, tolerance, device):
    case = Case(4, 2, 32, 0, None, False, [1] * 5, random, dtype, device)
    given, *_ = projected(case, 1, random, dtype, device)
    case.paged.num_rows.fill_(2)
    space = decode.DecodeSpace.create(8, case.shape, PAGE, dtype, device, 512)
    decode.plan_decode(case.paged, case.shape, 0, space, PAGE, True)
    decode.decode_attention(given, case.cache, case.paged, case.shape, case.scores, space, case.out)
    assert close(case.out[:2], case.want[:2], 4 * tolerance) and bool((case.out[2:] == 7.0).all())


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "cap", "sinks"), SHAPES)
def test_prefill_attention_over_ragged_spans_with_prefixes(
    heads, kv_heads, dim, window, cap, sinks, random, dtype, tolerance, device
):
    query_lens = [1, 5, 200, 33, 40]
    case = Case(heads, kv_heads, dim, window, cap, sinks, query_lens, random, dtype, device)
    size = prefill.prefill_tile(case.shape)
    tiles = [(span, first) for span, length in enumerate(query_lens) for first in range(0, length, size)]
    spans, firsts = (i32(list(each), device) for each in zip(*tiles, strict=True))
    prefill.prefill_attention(case.q, case.cache, case.paged, (spans, firsts), case.shape, case.scores, case.out)
    assert close(case.out, case.want, tolerance)
