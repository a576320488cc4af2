"""Matrix product with a weight, the same bits for a token whatever company it keeps.

A BLAS chooses its kernel by the shape of the product, so x @ weight.T rounds differently for 1, 2 or 300 tokens. Here
every product has the same shape: tokens go in tiles of exactly TILE, the last one padded with zeros, and a tile is
multiplied as weight @ tile.T. With OpenBLAS (Haswell, Zen, SkylakeX, Cooperlake, Sandybridge, Nehalem kernels) a
column's bits depend neither on its place among 16 nor on the other columns; with 32 or 64 columns they do.
"""

from __future__ import annotations

from headrace.ops.registry import op
from headrace.ops.xp import Array, namespace

TILE = 16
# A panel of the weight this large stays in the cache while all tiles pass over it: measured to be faster than the whole
# of a small model's output head. Panels depend on the weight's shape alone.
PANEL_ELEMENTS = 1 << 20


@op
def linear(x: Array, weight: Array, bias: Array | None = None, out: Array | None = None) -> Array:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: float32 [T, N], C-contiguous. T may be 0."""
    xp = namespace(x)
    num_tokens, in_size = x.shape
    out_size = weight.shape[0]
    if out is None:
        out = xp.empty((num_tokens, out_size), dtype=weight.dtype)
    tiles = [(start, x[start : start + TILE].T) for start in range(0, num_tokens - TILE + 1, TILE)]
    if rest := num_tokens % TILE:
        padded = xp.zeros((TILE, in_size), dtype=x.dtype)
        padded[:rest] = x[num_tokens - rest :]
        tiles.append((num_tokens - rest, padded.T))
    step = max(256, PANEL_ELEMENTS // in_size // 64 * 64)
    for first in range(0, out_size, step):
        panel = weight[first : first + step]
        if panel.shape[0] == 1:  # a lone row would become a matrix-vector product, whose bits depend on the column
            panel = xp.concat([panel, panel])
        for start, tile in tiles:
            target = out[start : start + TILE, first : first + step]
            target[...] = xp.matmul(panel, tile).T[: target.shape[0], : target.shape[1]]
    if bias is not None:
        out += bias
    return out
