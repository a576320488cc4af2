"""KVCacheManager: which blocks each request holds, in each layer group, and which it shares.

    table of a full group:    | b0 | b1 | b2 | b3 |
    table of a window group:  |  - |  - | b7 | b4 |        - : out of every later query's reach, given back

Ownership: a block in a table carries one reference of that table. Whoever adopts blocks (a prefix hit, a fork) never
writes into them while others hold them: it gets a copy first.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.block_pool import BlockPool
from headrace.core.kv_layout import KVLayout
from headrace.core.plan import NewBlocks
from headrace.core.prefix import Miss, PrefixIndex, block_key, extend_keys, namespace_key
from headrace.core.request import Request

GONE = -1  # in a window group's table: a block given back


@dataclass(frozen=True)
class PrefixHit:
    """Blocks that hold the first `num_tokens` tokens of a request; `GONE` where no window reaches."""

    num_tokens: int = 0
    tables: tuple[list[int], ...] = ()
    num_blocks: int = 0  # in the tables
    num_free: int = 0  # of these, blocks that are free now: taking the hit uses them up
    miss: Miss | None = None  # why it does not reach further; None: all that can be had


NO_HIT = PrefixHit()


class KVCacheManager:
    """Block tables over one pool. A table starts with `adopt` or `fork`, grows with `allocate`, becomes known to the
    prefix index and loses what no window reaches in `advance`, and goes back with `free`."""

    def __init__(self, layout: KVLayout, prefix_caching: bool = True):
        self.layout = layout
        self.index = PrefixIndex()
        self.pool = BlockPool(layout.num_blocks, self.index.forget if prefix_caching else None)
        self._caching = prefix_caching
        self._size = layout.block_size
        self._windows = tuple(group.window for group in layout.groups)
        self._has_windows = any(window is not None for window in self._windows)
        self._tables: dict[str, list[list[int]]] = {}
        self._held: dict[str, int] = {}  # blocks in a request's tables

    # -- accounts

    def held(self, request: Request) -> int:
        """Blocks the request holds over all groups."""
        return self._held.get(request.id, 0)

    def promised(self, request: Request) -> int:
        """Blocks the request will still take until all its known tokens are computed."""
        return max(0, self.layout.blocks_for(len(request.token_ids)) - self.held(request))

    def shortfall(self, request: Request, num_tokens: int) -> int:
        """Blocks to be taken before the request can write up to token `num_tokens`."""
        tables = self._tables.get(request.id)
        end = -(-num_tokens // self._size)
        if tables is None:
            return end * len(self._windows)
        return max(0, end - len(tables[0])) * len(tables) + len(self._shared_tail(request, tables))

    def _shared_tail(self, request: Request, tables: list[list[int]]) -> list[tuple[int, int]]:
        """(group, index) of the blocks that the request's next token goes into, if others hold them too."""
        index = request.num_scheduled // self._size
        if index >= len(tables[0]):
            return []
        return [(group, index) for group, table in enumerate(tables) if self.pool.is_shared(table[index])]

    # -- growing and shrinking

    def allocate(self, request: Request, num_tokens: int, copies: list[tuple[int, int]]) -> list[NewBlocks] | None:
        """Let the request write up to token `num_tokens`; None (and no change) if blocks are short.

        A shared block that its next token goes into is replaced by a copy: (source, copy) is added to `copies`, to be
        carried out before the step.
        """
        tables = self._tables.get(request.id)
        if tables is None:
            tables = [[] for _ in self._windows]
        had = len(tables[0])
        each = max(0, -(-num_tokens // self._size) - had)
        shared = self._shared_tail(request, tables) if request.num_scheduled < had * self._size else []
        ids = self.pool.take(each * len(tables) + len(shared))
        if ids is None:
            return None
        news = []
        for group, index in shared:
            source, own = tables[group][index], ids.pop()
            tables[group][index] = own
            self.pool.release([source])
            copies.append((source, own))
            news.append(NewBlocks(request.row, group, index, [own]))
        if each:
            self._tables[request.id] = tables
            self._held[request.id] = self._held.get(request.id, 0) + len(ids)
            for group, table in enumerate(tables):
                share = ids[group * each : (group + 1) * each] if len(tables) > 1 else ids
                news.append(NewBlocks(request.row, group, had, share))
                table.extend(share)
        request.num_slots = (had + each) * self._size
        return news

    def advance(self, request: Request, after_step: int) -> None:
        """Tokens were computed and accepted: full blocks become known, and what no window reaches is given back."""
        tables = self._tables[request.id]
        first, full = request.num_entered, request.num_computed // self._size
        if full > first:
            request.num_entered = full
            if self._caching:
                self._enter(request, tables, first, full)
        if self._has_windows:
            self._leave_windows(request, tables, after_step)

    def _enter(self, request: Request, tables: list[list[int]], first: int, full: int) -> None:
        keys, width = extend_keys(request, first, self._size), self._size * 4  # a fork's first keys may be missing
        data = request.token_bytes(first * self._size, full * self._size)
        parent = keys[first - 1] if first else namespace_key(request.cache_salt, request.adapter)
        for index in range(first, full):
            tokens = data[(index - first) * width : (index - first + 1) * width]
            if index == len(keys):
                keys.append(block_key(parent, tokens))
            for group, table in enumerate(tables):
                if table[index] != GONE:
                    self.index.enter(table[index], group, keys[index], parent, tokens)
            parent = keys[index]

    def _leave_windows(self, request: Request, tables: list[list[int]], after_step: int) -> None:
        for window, table in zip(self._windows, tables, strict=True):
            if window is not None:
                # the last `window` tokens, the next one included, are still to be seen
                out = range(min(max(0, request.num_computed - window + 1) // self._size, len(table)))
                gone = [table[index] for index in reversed(out) if table[index] != GONE]
                for index in out:
                    table[index] = GONE
                self.pool.release(gone, after_step)
                self._held[request.id] -= len(gone)

    def free(self, request: Request, after_step: int) -> None:
        """Give back everything the request holds, reusable once step `after_step` committed."""
        tables = self._tables.pop(request.id, [])
        self._held.pop(request.id, None)
        # the first tokens of a prompt are the likeliest to be asked for again: they are reused last
        for table in tables:
            self.pool.release([block for block in table if block != GONE], after_step)

    # -- sharing

    def match(self, request: Request) -> PrefixHit:
        """The longest prefix of the request's tokens, short of the last, whose blocks are known."""
        most = (len(request.token_ids) - 1) // self._size
        if not self._caching or not most:
            return NO_HIT
        keys = extend_keys(request, most, self._size)
        found = self._known_run(keys)
        count = self._longest_with_windows(found)
        tables, num_blocks, num_free = [], 0, 0
        for group, window in enumerate(self._windows):
            first = 0 if window is None else max(0, count * self._size - window + 1) // self._size
            blocks = [found[index][group] for index in range(first, count)]
            num_blocks += len(blocks)
            num_free += self.pool.count_unheld(blocks)
            tables.append([GONE] * first + blocks)
        miss = None
        if count < most:
            parent = keys[count - 1] if count else namespace_key(request.cache_salt, request.adapter)
            start = count * self._size
            miss = self.index.explain(parent, keys[count], request.token_bytes(start, start + self._size), start)
        return PrefixHit(count * self._size, tuple(tables), num_blocks, num_free, miss)

    def _known_run(self, keys: list[bytes]) -> list[dict[int, int]]:
        """Known blocks of each key by group, up to the first that a full group lacks."""
        full = {group for group, window in enumerate(self._windows) if window is None}
        found = []
        for key in keys:
            blocks = self.index.blocks(key)
            if not full <= blocks.keys():
                break
            found.append(blocks)
        return found

    def _longest_with_windows(self, found: list[dict[int, int]]) -> int:
        """The most blocks of `found` such that every window group has those that its window reaches from their end."""
        best = len(found)
        runs = []  # (window, for each number of blocks: how many of the last are known without a gap)
        for group, window in enumerate(self._windows):
            if window is not None:
                run = [0]
                for blocks in found:
                    run.append(run[-1] + 1 if group in blocks else 0)
                runs.append((window, run))
        while any(run[best] < best - max(0, best * self._size - window + 1) // self._size for window, run in runs):
            best -= 1
        return best

    def match_fork(self, parent: Request, child: Request, num_tokens: int) -> PrefixHit | None:
        """The first `num_tokens` computed tokens of `parent` as a hit for `child`, to the token; None if the parent
        does not have them (any more)."""
        tables = self._tables.get(parent.id)
        end = -(-num_tokens // self._size)
        if tables is None or parent.num_computed < num_tokens or num_tokens < 1:
            return None
        shared = []
        for window, table in zip(self._windows, tables, strict=True):
            first = 0 if window is None else max(0, num_tokens - window + 1) // self._size
            if GONE in table[first:end]:
                return None
            shared.append([GONE] * first + table[first:end])
        return PrefixHit(num_tokens, tuple(shared), sum(block != GONE for table in shared for block in table))

    def adopt(self, request: Request, hit: PrefixHit) -> list[NewBlocks]:
        """Give a request that holds nothing the blocks of a hit. Whoever writes first into a block that has become
        shared gets a copy of it."""
        if not hit.num_tokens:
            return []
        assert request.id not in self._tables, f"request {request.id} holds blocks already"
        self._tables[request.id] = [list(table) for table in hit.tables]
        blocks = [block for table in hit.tables for block in table if block != GONE]
        self.pool.touch(blocks)
        self._held[request.id] = len(blocks)
        request.num_computed = request.num_scheduled = request.num_slots = hit.num_tokens
        request.num_entered = hit.num_tokens // self._size
        return [
            NewBlocks(request.row, group, 0, [max(block, 0) for block in table])
            for group, table in enumerate(hit.tables)
        ]

    def check(self) -> None:
        """The full account of the pool; raises AssertionError on a leak."""
        tables = [[block for block in table if block != GONE] for each in self._tables.values() for table in each]
        self.pool.check(tables)
        for request_id, each in self._tables.items():
            held = sum(block != GONE for table in each for block in table)
            assert held == self._held[request_id], f"request {request_id} holds {held} blocks, {self._held[request_id]}"
