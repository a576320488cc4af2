"""Token trees on the GPU: the walk along what was drawn, and keys and values moved to where an accepted path stands.

A span that is a tree holds its nodes in the order in which they were drafted, parents first, and so do its slots. Of
the nodes behind one that is accepted that one is next whose token was drawn there (SpecInfer, Miao et al. 2024, section
4.3, with the draw of each position's noise). Once verified, what the accepted nodes have in the cache goes behind the
known tokens, as a chain would have left it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from headrace.ops.triton.runtime import kernel, launch_options, power_of_two
from headrace.ops.triton.step import COMPUTED, KNOWN, RECORD, TEMPERATURE, Draws, Lines, StepSpans, TableView, winner_of


@dataclass(frozen=True)
class TreeSpans:
    """What a step's tokens are to each other where spans are trees; chains have entries too."""

    ancestors: torch.Tensor  # int64 [T]  see ops/triton/spans.py
    shift: torch.Tensor  # int32 [T]  a token's depth less its place in its span: 0 in chains
    parents: torch.Tensor  # int32 [T]  the place in its span of the token before


@kernel
def _commit_trees(
    table, rows, query_start, num_rows, line_of, num_drafts, parents, greedy_values, greedy_tokens, warm_values,
    warm_tokens, num_chunks, tokens_at, tokens_stride, limit, drawn, drawn_stride, paths, paths_stride,
    RECORD: tl.constexpr, KNOWN: tl.constexpr, COMPUTED: tl.constexpr, TEMPERATURE: tl.constexpr,
    WARM: tl.constexpr, WIDTH: tl.constexpr, NODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if span < tl.load(num_rows):
        row = tl.load(rows + span).to(tl.int64)
        record = table + row * RECORD
        start = tl.load(query_start + span)
        length = tl.load(query_start + span + 1) - start
        line = tl.load(line_of + span)
        drafts = tl.load(num_drafts + span)
        kept = length  # tokens of the span that stand
        accepted = 0
        if line >= 0:
            known = tl.load(record + KNOWN)
            root = length - 1 - drafts  # the place of the last known token
            node = tl.arange(0, NODES)  # 0: that token, i: draft i
            there = (node > 0) & (node <= drafts)
            words = table + tokens_at + row * tokens_stride
            token = tl.load(words + known + node - 1, mask=there & (known + node <= limit), other=-1)
            parent = tl.load(parents + start + root + node, mask=there, other=-9) - root
            count = 0
            at = 0
            for step in tl.range(0, drafts + 1):
                if at >= 0:
                    winner = winner_of(
                        line + at, greedy_values, greedy_tokens, warm_values, warm_tokens, num_chunks,
                        record + TEMPERATURE, WARM, WIDTH,
                    )  # fmt: skip
                    # all of the drafts are read before one is written over
                    child = tl.min(tl.where((parent == at) & (token == winner), node, NODES), axis=0)
                    if (winner >= 0) | (step == 0):
                        tl.store(words + tl.minimum(known + step, limit - 1), tl.maximum(winner, 0))
                        tl.store(drawn + span * drawn_stride + step, winner)
                        count += 1
                        if step > 0:
                            tl.store(paths + span * paths_stride + step, at)
                            accepted = step
                    at = tl.where((winner >= 0) & (child < NODES), child, -1)
            if count <= drafts:
                tl.store(drawn + span * drawn_stride + count, -1)
            tl.store(record + KNOWN, known + count)
            kept = length - (drafts + 1 - count)
        tl.store(paths + span * paths_stride, accepted)
        tl.store(record + COMPUTED, tl.load(record + COMPUTED) + kept)


def commit_trees(
    view: TableView, spans: StepSpans, lines: Lines, draws: Draws, tree: TreeSpans, drawn: torch.Tensor,
    paths: torch.Tensor,
) -> None:  # fmt: skip
    """As the commit of `draw_and_commit`, for spans of which some are trees. The drafts of a span, in the table behind
    its row's known tokens, are nodes; line_of + i is the line of logits of draft i. `paths` int32 [max rows, 1 + most
    drafts] gets the number of drafts that were accepted of each span, then which of its drafts they are, from 1."""
    assert lines.num_drafts is not None
    _commit_trees[(spans.rows.shape[0],)](
        view.words, spans.rows, spans.query_start, spans.num_rows, lines.line_of, lines.num_drafts, tree.parents,
        draws.values[0], draws.tokens[0], draws.values[1], draws.tokens[1], draws.num_chunks, view.tokens_at,
        view.max_len, view.max_len, drawn, drawn.stride(0), paths, paths.stride(0),
        RECORD=RECORD, KNOWN=KNOWN, COMPUTED=COMPUTED, TEMPERATURE=TEMPERATURE, WARM=draws.warm, WIDTH=draws.width,
        NODES=power_of_two(drawn.shape[1], 16), **launch_options(num_warps=1),
    )  # fmt: skip


@kernel
def _move(
    key_pages, value_pages, slots, query_start, num_rows, paths, paths_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    span, head = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if span < tl.load(num_rows):
        start = tl.load(query_start + span)
        path = paths + span * paths_stride
        index = tl.arange(0, WIDTH)
        mask = index < DIM
        # a node never lies before its depth, so nothing is read that was written here; in chains it lies there
        for depth in tl.range(1, tl.load(path) + 1):
            node = tl.load(path + depth)
            if node != depth:
                source = tl.load(slots + start + node).to(tl.int64)
                target = tl.load(slots + start + depth).to(tl.int64)
                source = ((source // PAGE * KV_HEADS + head) * PAGE + source % PAGE) * DIM + index
                target = ((target // PAGE * KV_HEADS + head) * PAGE + target % PAGE) * DIM + index
                tl.store(key_pages + target, tl.load(key_pages + source, mask=mask), mask=mask)
                tl.store(value_pages + target, tl.load(value_pages + source, mask=mask), mask=mask)


def move_paths(
    cache: tuple[torch.Tensor, torch.Tensor], group: int, spans: StepSpans, paths: torch.Tensor
) -> None:
    """Move keys and values of accepted drafts, in one layer's pages [blocks, kv heads, page, D], behind their spans'
    last known tokens; `paths` as `commit_trees` leaves it."""
    key_pages, value_pages = cache
    _, kv_heads, page, dim = key_pages.shape
    _move[(spans.rows.shape[0], kv_heads)](
        key_pages, value_pages, spans.slots[group], spans.query_start, spans.num_rows, paths, paths.stride(0),
        KV_HEADS=kv_heads, DIM=dim, WIDTH=power_of_two(dim, 16), PAGE=page, **launch_options(num_warps=1),
    )  # fmt: skip
