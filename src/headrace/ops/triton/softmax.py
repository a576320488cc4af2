"""Softmax in pieces, as attention kernels make it: a step of keys more (online softmax: Milakov and Gimelshein 2018),
and adding up what the parts of a context left (Flash-Decoding, Dao et al. 2023). Scores are in powers of two."""

from __future__ import annotations

import triton
import triton.language as tl

MERGED = 8192  # elements of parts that are added up at a time


@triton.jit
def softmax_step(score, values, best, norm, sums, MASKED: tl.constexpr):
    """(best, norm, sums) [N], [N], [N, D] after scores [N, K] of the keys whose values are [K, D]. Not MASKED: no score
    is -inf."""
    higher = tl.maximum(best, tl.max(score, axis=1))
    safe = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weight = tl.exp2(score - safe[:, None])
    fade = tl.exp2(best - safe)
    norm = norm * fade + tl.sum(weight, axis=1)
    sums = sums * fade[:, None]
    sums = tl.dot(weight.to(values.dtype), values, sums, input_precision="ieee")
    return higher, norm, sums


@triton.jit
def merged_parts(
    part_out, part_norm, sinks, base, stride, num_parts, head, index,
    SHARED: tl.constexpr, WIDTH: tl.constexpr, MATES: tl.constexpr, MERGE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """[MATES, WIDTH]: the result of one token and key head, for the SHARED heads of the MATES that are there, of its
    `num_parts` parts, in order: sums in part_out [.., WIDTH], highest score and sum of weights in part_norm [.., 2].
    The first head's line of the first part is `base`; parts are `stride` lines apart. `index`: 0 .. WIDTH-1 [1, WIDTH].
    """
    merged = tl.arange(0, MERGE * MATES)  # MERGE parts at a time
    which, mate = merged // MATES, merged % MATES
    top = tl.full((MATES,), float("-inf"), tl.float32)
    whole = tl.zeros((MATES,), tl.float32)
    result = tl.zeros((MATES, WIDTH), tl.float32)
    for one in tl.range(0, num_parts, MERGE):
        part = base + mate + (one + which) * stride
        there = (mate < SHARED) & (one + which < num_parts)
        # other programs of the kernel may have written them: not from this processor's own cache
        part_best = tl.load(part_norm + part * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        part_sum = tl.load(part_norm + part * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        values = tl.load(part_out + part[:, None] * WIDTH + index, mask=there[:, None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(tl.reshape(part_best, (MERGE, MATES)), axis=0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(top - safe)
        shrink = tl.exp2(tl.reshape(part_best, (MERGE, MATES)) - safe[None, :])
        whole = whole * fade + tl.sum(shrink * tl.reshape(part_sum, (MERGE, MATES)), axis=0)
        result = result * fade[:, None]
        result += tl.sum(shrink[:, :, None] * tl.reshape(values, (MERGE, MATES, WIDTH)), axis=0)
        top = higher
    if SINKS:
        few = tl.arange(0, MATES)
        sink = tl.load(sinks + head * SHARED + few, mask=few < SHARED, other=0.0) * 1.4426950408889634
        whole += tl.exp2(sink - tl.where(top == float("-inf"), 0.0, top))
    return result / tl.where(whole == 0.0, 1.0, whole)[:, None]
