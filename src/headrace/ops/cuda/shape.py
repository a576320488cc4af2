"""What the kernel of a whole decode step is built for, and how the products of a model are cut for it."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

MOST_ROWS = 8  # tokens of a step: the short side of the matrix unit
TILE = 16  # rows of a weight in an item
STAGE = 32768  # bytes of a stage of weights
SHARED = (227 << 10) - 1024  # bytes of shared memory that a program may have on Hopper, less the kernel's own
_BESIDE_FOUR = 86 << 10  # bytes that are left beside a ring of four stages
LEAST_KEYS = 256  # of a part of a context: cutting finer costs more in adding up than it saves
SLICE = 64  # inner elements that a warp takes at a time
_MOST_SPLIT_ITEMS = 32  # of a processor: bits of a word


@dataclass(frozen=True)
class StepShape:
    """Constants of a build. Each is a macro of its name in capitals (csrc/params.cuh)."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    half: int  # rotating pairs of a head
    page: int  # tokens of a block of the KV cache
    bias: int  # of q, k and v: 0 or 1
    qk_norm: int
    gelu: int  # GELU in its tanh form instead of SiLU

    def macros(self) -> list[str]:
        """Options of the compiler."""
        values = zip(fields(self), astuple(self), strict=True)
        return [*(f"-D{each.name.upper()}={value}" for each, value in values), f"-DSTAGES={self.stages}"]

    @property
    def stages(self) -> int:
        """Of the ring of weights. A fourth brings 1 % where there is room for it: more is lost where four rows of the
        inner size no longer fit beside it and have to be split."""
        return 4 if 4 * self.inner * 2 <= _BESIDE_FOUR else 3

    @property
    def label(self) -> str:
        """For file names and messages."""
        return "_".join(str(value) for value in astuple(self))

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True)
class ProductCut:
    """How a weight [rows, inner] is cut for the kernel (csrc/params.cuh, Product)."""

    tiles: int
    splits: int  # of the inner dimension, added up in order
    span: int  # inner elements of a split
    chunk: int  # of them in a stage
    chunks: int
    box: int  # elements of a row of the copy's box
    rows: int
    advance: int  # items, modulo the number of processors
    magic: int  # 2^32 / (span / 8), rounded up

    def source_bytes(self, capacity: int) -> int:
        """Shared memory of `capacity` tokens' part of what is multiplied."""
        return capacity * (self.span * 2 + 64)


def cut_product(
    rows: int, inner: int, capacity: int, room: int, processors: int, may_split: bool = False, gated: bool = False
) -> ProductCut | None:
    """The cut with the fewest splits whose source fits in `room` bytes; None: there is none. `rows` of the weight; of a
    gated one, whose tiles are of 8 rows of each half, those of a half."""
    tile = TILE // 2 if gated else TILE
    for splits in range(1, 17 if may_split else 2):
        # a processor's items must all be of one split, whose source it holds
        if processors % splits or inner % (splits * SLICE):
            continue
        span = inner // splits
        chunks = -(-span // (STAGE // (2 * TILE)))
        # the smaller the chunk, the less is read beyond the span; the larger the box, the fewer rows a copy has
        chunk, box = min((-(-span // (chunks * box)) * box, -box) for box in (256, 128, 64) if span % box == 0)
        box = -box
        tiles = -(-rows // tile)
        items, magic = tiles * splits, 2**32 // (span // 8) + 1
        cut = ProductCut(tiles, splits, span, chunk, chunks, box, rows, items % processors, magic)
        if cut.source_bytes(capacity) <= room and (splits == 1 or items <= _MOST_SPLIT_ITEMS * processors):
            return cut
    return None


def cut_step(shape: StepShape, vocab: int, capacity: int, room: int, processors: int) -> list[ProductCut] | None:
    """Cuts of qkv, out, gate and up, down, head for steps of up to `capacity` rows; None: they need more memory."""
    hidden = shape.hidden
    cuts = [
        cut_product(shape.qkv_size, hidden, capacity, room, processors),
        cut_product(hidden, shape.q_size, capacity, room, processors, may_split=True),
        cut_product(shape.inner, hidden, capacity, room, processors, gated=True),
        cut_product(hidden, shape.inner, capacity, room, processors, may_split=True),
        cut_product(vocab, hidden, capacity, room, processors),
    ]
    found = [cut for cut in cuts if cut is not None]
    return found if len(found) == len(cuts) else None


# bytes of a layer's weights up to which steps of so many rows were faster in the kernel than as a chain of Triton
# kernels: the engine's time of a step on an H200, context 128 to 256. SmolLM2-135M has 7 MB, Llama-3.2-1B 122 MB,
# Llama-3.1-8B 436 MB; of 8 rows of the last the chain is faster. What is larger was not measured.
_MEASURED = ((125_000_000, 8), (450_000_000, 4))


def measured_rows(shape: StepShape) -> int:
    """Rows up to which the kernel was measured to be faster than the chain of Triton kernels; 0: never."""
    numbers = shape.hidden * (shape.qkv_size + shape.q_size + 3 * shape.inner)
    return next((rows for most, rows in _MEASURED if 2 * numbers <= most), 0)
