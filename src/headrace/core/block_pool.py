"""BlockPool: who holds which block of KV cache.

    free ──take──> held (reference count >= 1) ──release──> waiting for steps in flight ──settle──> free

A released block is reusable only once every step that may still name it has committed. Free blocks are taken in
order of release, so the longest unused goes first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference counts over `num_blocks` blocks, ids 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int):
        if num_blocks < 1:
            raise ValueError(f"a KV cache needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._waiting: deque[tuple[int, list[int]]] = deque()  # (step that must commit first, blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free)

    @property
    def num_waiting(self) -> int:
        """Released blocks that steps in flight may still name."""
        return sum(len(ids) for _, ids in self._waiting)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self.num_waiting

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing taken) if there are not enough."""
        if count > len(self._free):
            return None
        ids = [self._free.popleft() for _ in range(count)]
        for block in ids:
            self._references[block] = 1
        return ids

    def touch(self, ids: Sequence[int]) -> None:
        """One more reference to each held block."""
        for block in ids:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is not held")
            self._references[block] += 1

    def release(self, ids: Sequence[int], after_step: int = -1) -> None:
        """Drop one reference each; blocks nobody holds become free once step `after_step` has committed."""
        freed = []
        for block in ids:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released more often than taken")
            self._references[block] -= 1
            if not self._references[block]:
                freed.append(block)
        if freed:
            self._waiting.append((after_step, freed))

    def settle(self, committed_step: int) -> None:
        """Steps up to `committed_step` have committed: what waited for them is free."""
        while self._waiting and self._waiting[0][0] <= committed_step:
            self._free.extend(self._waiting.popleft()[1])

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the tables `held` account for every block exactly."""
        counted = Counter(block for table in held for block in table)
        free = list(self._free) + [block for _, ids in self._waiting for block in ids]
        assert len(free) == len(set(free)), "a block is free twice"
        for block in range(self.num_blocks):
            assert self._references[block] == counted[block], (
                f"block {block}: {self._references[block]} references, {counted[block]} holders"
            )
        unheld = {block for block in range(self.num_blocks) if not counted[block]}
        assert set(free) == unheld, "leaked or double-booked blocks: " + str(sorted(set(free) ^ unheld)[:8])
