"""DeviceBatch: the arrays of one step on the GPU, at fixed addresses, so that eager steps and graphs read the same.

What the host knows of a step goes over in one transfer from pinned memory, laid out as `_Layout` says; the rest is
filled by kernels from the request table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.core.plan import StepPlan
from headrace.ops.triton.runtime import RUNTIME
from headrace.ops.triton.step import Lines, StepSpans
from headrace.ops.triton.trees import TreeSpans
from headrace.worker.device_table import DeviceTable
from headrace.worker.device_trees import StepTrees, TreeBuffers
from headrace.worker.graphs import GraphKey

_RING = 4  # pinned buffers: more than there can be steps in flight, if nobody says how many


@dataclass(frozen=True)
class DeviceBatch:
    """One step: R spans (padded), T tokens, L lines of logits, G layer groups."""

    spans: StepSpans
    lines: Lines
    logit_index: torch.Tensor | None  # int32 [L] tokens whose logits are wanted; None: token l of line l
    block_tables: tuple[torch.Tensor, ...]  # G x int32 [max rows, max blocks]
    num_tokens: torch.Tensor  # int32 [1]  padding left out
    num_decode_rows: torch.Tensor  # int32 [1]  leading spans of one token, padding left out
    num_decodes: int  # the same with padding
    tiles: tuple[torch.Tensor, torch.Tensor] | None  # of the other spans
    longest: int  # tokens of the longest span
    alone: tuple[tuple[int, int], ...] = ()  # tokens from .. to of spans that the library's attention serves
    mixed: bool = False  # padded, and any span may have any length: only the GPU knows
    most_queries: int = 0  # where all spans are short, or some are trees: tokens that each short one has at most
    tree: TreeSpans | None = None  # of T tokens, where spans are token trees
    # (int32 [N], int32 [1]): the rows of the first N tokens, padding included, and how many there are without it, where
    # each attends by itself, as it would without drafts
    singles: tuple[torch.Tensor, torch.Tensor] | None = None


class _Layout:
    """Where the parts lie in the buffer that the host fills, in int32 words."""

    def __init__(self, max_rows: int, max_lines: int, max_tiles: int):
        at = 0
        self.slices: dict[str, slice] = {}
        for name, size in (
            # spans that are not padding; leading ones of one token; tokens that attend by themselves; tokens
            ("counts", 4),
            ("rows", max_rows),
            ("query_start", max_rows + 1),
            ("line_of", max_rows),
            ("num_drafts", max_rows),
            ("span_of", max_lines),
            ("logit_index", max_lines),
            ("single_rows", max_lines),
            ("tile_span", max_tiles),
            ("tile_first", max_tiles),
        ):
            self.slices[name] = slice(at, at + size)
            at += size
        self.size = at


class DeviceBatchBuilder:
    """Owns the buffers of steps of up to `max_rows` spans and `max_tokens` tokens."""

    def __init__(
        self,
        table: DeviceTable,
        max_rows: int,
        max_tokens: int,
        tile: int,
        alone_from: int,
        device: torch.device,
        most_drafts: int = 0,
        ring: int = _RING,
        trees: bool = False,
        invariant: bool = False,
    ):
        """`tile`: queries of a tile of prefill; spans of `alone_from` tokens and more without a prefix have none.
        `most_drafts`: of a span, which may be `trees`; `ring`: more than there can be steps in flight. `invariant`: a
        token that follows drafts has the bits that it has without them."""
        max_rows += 1  # steps under graphs may have one more span, for the padding
        self._table = table
        self._most_drafts = most_drafts
        self.max_lines = min(max_tokens, max_rows * (1 + most_drafts))
        self._tile = tile
        self._alone_from = alone_from
        self._device = device
        pinned = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if pinned else None
        layout = _Layout(max_rows, self.max_lines, max_rows + -(-max_tokens // tile))
        self._slices = layout.slices
        self._pinned = [torch.zeros(layout.size, dtype=torch.int32, pin_memory=pinned) for _ in range(ring)]
        self._turn = 0
        self._inbox = torch.zeros(layout.size, dtype=torch.int32, device=device)
        self._sent = np.zeros(0, np.int32)
        # a step without spans, nor tiles: attention would take 0 for a tile of span 0
        self._blank = np.zeros(layout.size, np.int32)
        self._blank[layout.slices["tile_span"]] = -1
        self._padded: dict[GraphKey, DeviceBatch] = {}
        # what the padded step that was sent last is known by, if the GPU has it still
        self._same: tuple[Any, ...] | None = None
        self._patch_pinned = [torch.zeros(0, dtype=torch.int32) for _ in range(ring)]
        self._patch_events: list[torch.cuda.Event | None] = [None] * ring
        self._patch_turn = 0
        self._invariant = invariant
        self._trees = TreeBuffers(max_tokens, ring, device) if trees else None
        groups = table.view.num_groups

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._token_ids, self._positions, self._slots = zeros(max_tokens), zeros(max_tokens), zeros(groups, max_tokens)
        self._seq_lens = zeros(max_rows)
        self._block_tables = tuple(table.view.block_table(group) for group in range(groups))

    def _part(self, name: str, count: int) -> torch.Tensor:
        start = self._slices[name].start
        return self._inbox[start : start + count]

    def spans_of(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each span of a step begins, int32 [max rows + 1], and how many drafts it has, int32 [max rows]."""
        rows = self._seq_lens.shape[0]
        return self._part("query_start", rows + 1), self._part("num_drafts", rows)

    def padded_batch(self, key: GraphKey) -> DeviceBatch:
        """The batch of a step that is padded to `key`; its content comes with `send`."""
        if key not in self._padded:
            self._padded[key] = self._make_padded(key)
        return self._padded[key]

    def _make_padded(self, key: GraphKey) -> DeviceBatch:
        rows, tokens = key.num_rows, key.num_tokens
        spans, counts = self._spans(rows, tokens), self._part("counts", 4)
        lines = Lines(self._part("span_of", rows), self._part("line_of", rows))
        if key.decodes:
            return DeviceBatch(spans, lines, None, self._block_tables, counts[3:], counts[1:2], rows, None, 1)
        if key.short:
            lines = Lines(self._part("span_of", tokens), self._part("line_of", rows), self._part("num_drafts", rows))
        num_tiles = rows + -(-tokens // self._tile)
        return DeviceBatch(
            spans=spans,
            lines=lines,
            logit_index=None if key.short else self._part("logit_index", rows),
            block_tables=self._block_tables,
            num_tokens=counts[3:],
            num_decode_rows=counts[1:2],
            num_decodes=0 if key.short else rows,
            tiles=(self._part("tile_span", num_tiles), self._part("tile_first", num_tiles)),
            longest=tokens,
            mixed=True,
            most_queries=1 + self._most_drafts if key.short else 0,
            tree=self._tree(tokens) if key.tree else None,
            singles=self._singles(tokens) if key.short and self._invariant else None,
        )

    def _singles(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._part("single_rows", num_tokens), self._part("counts", 4)[2:3]

    def _tree(self, num_tokens: int) -> TreeSpans:
        assert self._trees is not None, "the configuration has no trees"
        return self._trees.spans(num_tokens)

    def _spans(self, num_rows: int, num_tokens: int) -> StepSpans:
        return StepSpans(
            rows=self._part("rows", num_rows),
            query_start=self._part("query_start", num_rows + 1),
            num_rows=self._part("counts", 4)[:1],
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            seq_lens=self._seq_lens[:num_rows],
            slots=self._slots[:, :num_tokens],
        )

    def idle(self, key: GraphKey) -> None:
        """Make every following run under `key` a step of padding only, until `send`."""
        words = self._blank.copy()
        self._pad(words, key, 0, 0)
        self._upload(words)
        if key.tree and self._trees is not None:
            self._trees.clear()

    def _pad(self, words: np.ndarray, key: GraphKey, count: int, num_tokens: int) -> None:
        """Spans of padding behind `count` spans of `num_tokens` tokens, which write nowhere."""
        starts = words[self._slices["query_start"]]
        if key.decodes:
            starts[:] = np.arange(len(starts))
        else:  # one that takes all tokens left over, then empty ones
            starts[count] = num_tokens
            starts[count + 1 :] = key.num_tokens
            words[self._slices["line_of"]][count:] = -1

    def _alone(self, plan: StepPlan, key: GraphKey | None) -> np.ndarray:
        """Spans that are left to the library's attention, which no graph holds: where the host is what a step waits
        for, a graph with our own gains more."""
        return (plan.lengths >= self._alone_from) & (plan.starts == 0) & (key is None)

    def is_short(self, plan: StepPlan) -> bool:
        """All spans are as short as those that verify drafts, and some are longer than one token. Where
        invariant: all verify, or are generated, since parts of prompts go through other kernels."""
        if self._invariant and not self.generated(plan).all():
            return False
        return 1 < int(plan.lengths.max()) <= 1 + self._most_drafts

    def generated(self, plan: StepPlan) -> np.ndarray:
        """bool [S]: spans that decode, or verify drafts behind a token; where invariant, none that is a prompt's last
        token, which goes through the kernel of prompts in any company."""
        single = plan.lengths == 1 + plan.num_drafts
        if RUNTIME.invariant:
            single &= plan.starts >= self._table.host.sampling.prompt_len[plan.rows]
        return single

    def send(
        self, plan: StepPlan, key: GraphKey | None, trees: StepTrees | None = None, rewritten: bool = False
    ) -> DeviceBatch:
        """Bring a step to the GPU, to run padded to `key`, or as it is; `trees`: those among its spans. `rewritten`: of
        its spans the GPU writes anew what depends on their lengths (ops/triton/follow.py)."""
        count, lengths, rows = plan.num_spans, plan.lengths, plan.rows
        drawn = plan.yields & ~self._table.hosted[rows]
        others, same = ~self.generated(plan) if RUNTIME.invariant else lengths != 1, None
        if key is not None and trees is None:
            same = key, rewritten, rows.tobytes(), plan.spans[2:].tobytes(), drawn.tobytes(), others.tobytes()
            if same == self._same:  # as it is in most steps, those that verify included
                return self.padded_batch(key)
        words = self._blank.copy()
        parts = {name: words[where] for name, where in self._slices.items()}
        starts = parts["query_start"]
        parts["rows"][:count] = rows
        np.cumsum(lengths, dtype=np.int32, out=starts[1 : count + 1])
        decodes = int(np.argmax(others)) if others.any() else count
        short = self.is_short(plan) and not RUNTIME.invariant if key is None else key.short
        singles = 0  # leading tokens that attend by themselves
        if self._invariant and plan.num_drafts.any():
            singles = int(starts[decodes])
            parts["single_rows"][:singles] = np.repeat(rows[:decodes], lengths[:decodes])
        if short or trees is not None:
            decodes = 0
        if trees is not None and self._trees is not None:
            self._trees.send(trees)
        parts["counts"][:] = count, decodes, singles, plan.num_tokens
        parts["num_drafts"][:count] = np.where(drawn, plan.num_drafts, 0)
        num_lines = self._lines(plan, key, parts, drawn)
        alone = self._alone(plan, key)
        shortest = 2 + self._most_drafts if trees is not None and not short else 1  # shorter ones are not tiles'
        tiled = decodes + np.flatnonzero(~alone[decodes:] & (lengths[decodes:] >= shortest))
        num_tiles = self._tile_up(tiled, lengths[tiled], parts)
        if key is not None:
            self._pad(words, key, count, plan.num_tokens)
            self._upload(words)
            self._same = same
            if rewritten:
                self._sent = self._sent[:0]  # the GPU will have something else
            return self.padded_batch(key)
        self._upload(words)
        drafts = self._part("num_drafts", count) if self._most_drafts else None
        return DeviceBatch(
            spans=self._spans(count, plan.num_tokens),
            lines=Lines(self._part("span_of", num_lines), self._part("line_of", count), drafts),
            logit_index=self._part("logit_index", num_lines),
            block_tables=self._block_tables,
            num_tokens=self._part("counts", 4)[3:],
            num_decode_rows=self._part("counts", 4)[1:2],
            num_decodes=decodes,
            tiles=(self._part("tile_span", num_tiles), self._part("tile_first", num_tiles)) if num_tiles else None,
            longest=int(lengths.max()),
            alone=tuple((int(starts[span]), int(starts[span + 1])) for span in np.flatnonzero(alone)),
            most_queries=1 + self._most_drafts if short or trees is not None else 0,
            tree=None if trees is None else self._tree(plan.num_tokens),
            singles=self._singles(singles) if singles else None,
        )

    def _tile_up(self, spans: np.ndarray, lengths: np.ndarray, parts: dict[str, np.ndarray]) -> int:
        """Fill in the tiles of `spans`; how many there are."""
        counts = -(-lengths // self._tile)
        total = int(counts.sum())
        if total == len(spans):
            parts["tile_span"][:total], parts["tile_first"][:total] = spans, 0
        else:
            within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
            parts["tile_span"][:total], parts["tile_first"][:total] = np.repeat(spans, counts), within * self._tile
        return total

    def _lines(self, plan: StepPlan, key: GraphKey | None, parts: dict[str, np.ndarray], drawn: np.ndarray) -> int:
        """Fill in which spans the lines of logits belong to, and which tokens; how many lines there are."""
        count, starts = plan.num_spans, parts["query_start"]
        if key is not None and key.decodes:  # every token has a line, whether it is wanted or not
            parts["span_of"][:count] = number = np.arange(count, dtype=np.int32)
            parts["line_of"][:count] = np.where(drawn, number, -1)
            return count
        every = key is not None and key.short  # the same
        wanted = plan.lengths if every else np.where(plan.yields, 1 + plan.num_drafts, 0)
        span_of = np.repeat(np.arange(count, dtype=np.int32), wanted)
        first = np.cumsum(wanted) - wanted  # line of each span
        parts["span_of"][: len(span_of)] = span_of
        within = np.arange(len(span_of)) - first[span_of]
        parts["logit_index"][: len(span_of)] = (starts[1 : count + 1] - wanted)[span_of] + within
        # what is drawn counts from a span's last known token on
        counted = first + (plan.lengths - 1 - plan.num_drafts if every else 0)
        parts["line_of"][:count] = np.where(drawn, counted, -1)
        return len(span_of)

    def _upload(self, words: np.ndarray) -> None:
        self._same = None
        if np.array_equal(words, self._sent):  # the same rows once more
            return
        self._sent = words
        pinned = self._pinned[self._turn]
        self._turn = (self._turn + 1) % len(self._pinned)
        pinned.numpy()[:] = words
        self._inbox.copy_(pinned, non_blocking=True)

    def take_patches(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(words, segments) of what the table has to be told, on the GPU; None: nothing."""
        taken = self._table.patches.take()
        if taken is None:
            return None
        segments, words = taken
        size = segments.size + len(words)
        turn = self._patch_turn
        self._patch_turn = (turn + 1) % len(self._patch_pinned)
        if (event := self._patch_events[turn]) is not None:
            event.synchronize()
        if self._patch_pinned[turn].shape[0] < size:
            pinned = self._device.type == "cuda"
            self._patch_pinned[turn] = torch.zeros(2 * size, dtype=torch.int32, pin_memory=pinned)
        buffer = self._patch_pinned[turn]
        host = buffer.numpy()
        host[: segments.size] = segments.reshape(-1)
        host[segments.size : size] = words
        moved = buffer[:size].to(self._device, non_blocking=True)
        if self._device.type == "cuda":
            event = event or torch.cuda.Event()
            event.record(self._stream)
            self._patch_events[turn] = event
        return moved[segments.size :], moved[: segments.size].view(-1, 4)
