"""BlockPool: who holds which block of KV cache.

    free ──take──> held (reference count >= 1) ──release──> waiting for steps in flight ──settle──> free
      └────touch────^ ^──────────────────────────touch──────────────┘        (touch: a prefix hit, or a fork)

A released block is reusable only once every step that may still name it has committed. Free blocks are taken in order
of release, so the longest unused goes first; until then the prefix index may know what they hold, and a hit brings them
back.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Reference counts over `num_blocks` blocks, ids 0 .. num_blocks - 1. `on_reuse(block)` is called before a block
    is given to a new holder."""

    def __init__(self, num_blocks: int, on_reuse: Callable[[int], None] | None = None):
        if num_blocks < 1:
            raise ValueError(f"a KV cache needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._references: dict[int, int] = {}  # of blocks that are held
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._waiting: deque[tuple[int, list[int]]] = deque()  # (step that must commit first, blocks)
        self._waits_for: dict[int, int] = {}  # block -> the step it waits for
        self._on_reuse = on_reuse

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free)

    @property
    def num_waiting(self) -> int:
        """Released blocks that steps in flight may still name."""
        return len(self._waits_for)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self.num_waiting

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing taken) if there are not enough."""
        if count > len(self._free):
            return None
        ids, free = [], self._free
        for _ in range(count):
            block, _ = free.popitem(last=False)
            self._references[block] = 1
            if self._on_reuse is not None:
                self._on_reuse(block)
            ids.append(block)
        return ids

    def count_unheld(self, ids: Iterable[int]) -> int:
        """Blocks of `ids` that nobody holds."""
        references = self._references
        return sum(block not in references for block in ids)

    def is_shared(self, block: int) -> bool:
        """More than one holder: whoever writes must copy first."""
        return self._references.get(block, 0) > 1

    def touch(self, ids: Iterable[int]) -> None:
        """One more reference to each block, whatever its state."""
        for block in ids:
            references = self._references.get(block, 0)
            if not references and self._waits_for.pop(block, None) is None:
                del self._free[block]
            self._references[block] = references + 1

    def release(self, ids: Iterable[int], after_step: int = -1) -> None:
        """Drop one reference each; blocks nobody holds become free once step `after_step` has committed. Of `ids` the
        first is reused last."""
        freed = []
        for block in ids:
            references = self._references.get(block, 0)
            if references > 1:
                self._references[block] = references - 1
            elif references:
                del self._references[block]
                freed.append(block)
            else:
                raise ValueError(f"block {block} is released more often than taken")
        if freed:
            self._waiting.append((after_step, freed[::-1]))
            self._waits_for.update(dict.fromkeys(freed, after_step))

    def settle(self, committed_step: int) -> None:
        """Steps up to `committed_step` have committed: what waited for them is free."""
        while self._waiting and self._waiting[0][0] <= committed_step:
            step, ids = self._waiting.popleft()
            for block in ids:
                if self._waits_for.get(block) == step:  # not touched or released again since
                    del self._waits_for[block]
                    self._free[block] = None

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the tables `held` account for every block exactly."""
        counted = Counter(block for table in held for block in table)
        # a pool may have 10^5 blocks, and this runs whenever the engine falls idle: what is free is only counted
        for block, count in counted.items():
            references = self._references.get(block, 0)
            assert references == count, f"block {block}: {references} references, {count} holders"
            assert block not in self._free and block not in self._waits_for, f"block {block} is held, and yet free"
        leaked = [block for block in self._references if block not in counted]
        assert not leaked, f"{len(leaked)} blocks have references and no holders: leaked blocks {leaked[:8]}"
        assert not any(block in self._free for block in self._waits_for), "a block is both free and waiting"
        accounted = len(self._free) + len(self._waits_for) + len(counted)
        assert accounted == self.num_blocks, f"{self.num_blocks - accounted} blocks are neither free nor held"
