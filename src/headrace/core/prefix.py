"""Prefix cache: which computed blocks hold which tokens, and why a prompt did not find its own.

A full block is known by a 128-bit key that hashes its parent's key and its own tokens; the first parent is the key of a
namespace (salt, adapter). So equal keys mean equal tokens from the first on, in the same namespace. Blocks are entered
when their tokens have been computed and accepted, never before; they stay known while free, until they are taken for
something else (evicted). Design: vLLM's hash-chained blocks, with the reason of each miss kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

from headrace.core.request import Request

KEY_BYTES = 16
_REMEMBERED_EVICTIONS = 1 << 16
_NO_BLOCKS: dict[int, int] = {}


def namespace_key(salt: str | None, adapter: str | None) -> bytes:
    """The parent of a first block. An empty salt is no salt; a salt and an adapter of one name do not meet."""
    parts = [(salt or "").encode(), (adapter or "").encode()]
    return blake2b(b"".join(len(part).to_bytes(8, "little") + part for part in parts), digest_size=KEY_BYTES).digest()


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """Key of a block of `tokens` (int32, little endian) after the block `parent`."""
    return blake2b(parent + tokens, digest_size=KEY_BYTES).digest()


@dataclass(frozen=True)
class Miss:
    """Why a prefix match ended where it did."""

    position: int  # first token that has to be computed
    reason: str


class PrefixIndex:
    """Blocks by key, for each layer group.

    There may be 10^5 blocks, so what is kept of each are tuples of bytes and numbers, and dicts of numbers: the garbage
    collector need not look at those again and again, as it would at tuples that hold dicts.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, dict[int, int]] = {}  # key -> group -> block
        self._origins: dict[bytes, tuple[bytes, bytes]] = {}  # key -> (parent, tokens)
        self._key_of: dict[int, tuple[bytes, int]] = {}  # block -> (key, group)
        self._children: dict[bytes, tuple[bytes, ...]] = {}  # parent -> tokens of the blocks that follow it, sorted
        self._evicted: OrderedDict[bytes, int] = OrderedDict()  # key -> count of evictions when it went
        self.num_evictions = 0

    def __len__(self) -> int:
        """Blocks known."""
        return len(self._key_of)

    def blocks(self, key: bytes) -> dict[int, int]:
        """Blocks that hold the tokens of `key`, by layer group."""
        return self._blocks.get(key, _NO_BLOCKS)

    def known(self, block: int) -> bool:
        return block in self._key_of

    def enter(self, block: int, group: int, key: bytes, parent: bytes, tokens: bytes) -> None:
        """Make a computed block known; if another block already holds the same, that one stays."""
        blocks = self._blocks.get(key)
        if blocks is None:
            self._blocks[key], self._origins[key] = {group: block}, (parent, tokens)
            siblings = self._children.get(parent, ())
            at = bisect_left(siblings, tokens)
            self._children[parent] = (*siblings[:at], tokens, *siblings[at:])
            if self._evicted:
                self._evicted.pop(key, None)
        elif blocks.setdefault(group, block) != block:
            return
        self._key_of[block] = (key, group)

    def forget(self, block: int) -> None:
        """A block is about to hold something else."""
        place = self._key_of.pop(block, None)
        if place is None:
            return
        key, group = place
        blocks = self._blocks[key]
        del blocks[group]
        if blocks:
            return
        del self._blocks[key]
        parent, tokens = self._origins.pop(key)
        siblings = self._children[parent]
        at = bisect_left(siblings, tokens)
        self._children[parent] = siblings[:at] + siblings[at + 1 :]
        if len(siblings) == 1:
            del self._children[parent]
        self.num_evictions += 1
        self._evicted[key] = self.num_evictions
        if len(self._evicted) > _REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)

    def explain(self, parent: bytes, key: bytes, tokens: bytes, start: int) -> Miss:
        """Why the block `key` of `tokens`, whose first token stands at `start`, was not found after `parent`."""
        if key in self._evicted:
            ago = self.num_evictions - self._evicted[key]
            return Miss(start, f"the block at token {start} was evicted {ago} evictions ago; a larger kv_cache helps")
        if key in self._blocks:
            return Miss(start, f"the block at token {start} is kept for some layer groups only")
        best = -1
        siblings = self._children.get(parent, ())
        at = bisect_left(siblings, tokens)
        for other in siblings[max(0, at - 1) : at + 1]:  # in their order, those before and after it are most like it
            unlike = (i for i in range(0, len(tokens), 4) if tokens[i : i + 4] != other[i : i + 4])
            best = max(best, next(unlike, len(tokens)) // 4)
        if best >= 0:
            return Miss(start + best, f"no known prompt goes on like this: the first other token is at {start + best}")
        if start == 0:
            return Miss(0, "nothing is known in this namespace (salt, adapter)")
        return Miss(start, f"what is known of this prefix ends at token {start}")


def extend_keys(request: Request, num_blocks: int, block_size: int) -> list[bytes]:
    """The request's first `num_blocks` block keys, computing those it lacks; its tokens must be that many blocks."""
    keys = request.block_keys
    if len(keys) < num_blocks:
        parent = keys[-1] if keys else namespace_key(request.cache_salt, request.adapter)
        data = request.token_bytes(len(keys) * block_size, num_blocks * block_size)
        width = block_size * 4
        for offset in range(0, len(data), width):
            parent = block_key(parent, data[offset : offset + width])
            keys.append(parent)
    return keys
