"""GraphLauncher: decode steps as CUDA graphs, one per number of rows, other steps eagerly.

A graph holds a whole decode step, from the request table back into it: inputs, forward pass, head, draw, commit. It is
captured from a step of padding only, in which every kernel finds nothing to do, so capturing needs no request and
disturbs none. Steps with fewer rows run in the next larger graph, whose kernels skip the padding.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
AT_START = 16  # rows up to which graphs are captured before the first request, where they save the most
HITS_TO_CAPTURE = 2


@dataclass(frozen=True)
class GraphKey:
    """What a graph is good for."""

    num_rows: int  # padded
    warm: bool  # rows may have a temperature
    cut: bool  # rows may have top_k, top_p or min_p


@dataclass
class GraphCounts:
    """What the graphs did so far."""

    replays: int = 0
    eager: int = 0
    padding: int = 0  # rows
    captures: int = 0
    capture_seconds: float = 0.0


class GraphLauncher:
    """Runs `body(key)`, eagerly or as a graph. `body` must read and write memory of fixed addresses only."""

    def __init__(self, body: Callable[[GraphKey], None], idle: Callable[[], None], max_rows: int, enabled: bool):
        """`idle` makes what follows a step of padding only."""
        self._body, self._idle = body, idle
        self._sizes = [size for size in SIZES if size < max_rows] + [max_rows]
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._seen: dict[GraphKey, int] = {}
        self._pool: Any = None  # memory that all graphs share
        self.enabled = enabled
        self.counts = GraphCounts()

    def pick(self, num_rows: int, warm: bool, cut: bool) -> GraphKey:
        """The key that a decode step of `num_rows` rows runs under."""
        padded = next(size for size in self._sizes if size >= num_rows) if self.enabled else num_rows
        return GraphKey(padded, warm, cut)

    def prepare(self) -> None:
        """Capture the graphs of small greedy and sampled steps."""
        if self.enabled:
            for size in self._sizes:
                if size <= AT_START:
                    self._capture(GraphKey(size, False, False))

    def clear(self) -> None:
        """Forget every graph."""
        self._graphs.clear()
        self.enabled = False

    def wants_capture(self, key: GraphKey) -> bool:
        """Whether a step under `key` is to be captured now: it came before and has no graph."""
        if not self.enabled or key in self._graphs:
            return False
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] >= HITS_TO_CAPTURE

    def capture(self, key: GraphKey) -> None:
        """Capture before a step is sent; the content of the fixed buffers is lost."""
        self._capture(key)

    def run(self, key: GraphKey, num_rows: int) -> None:
        """Run the step whose content has been sent."""
        graph = self._graphs.get(key)
        if graph is None:
            self.counts.eager += 1
            self._body(key)
            return
        self.counts.replays += 1
        self.counts.padding += key.num_rows - num_rows
        graph.replay()

    def _capture(self, key: GraphKey) -> None:
        started = time.perf_counter()
        self._idle()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._body(key)  # compiles what is new
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._body(key)
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph
        self.counts.captures += 1
        self.counts.capture_seconds += time.perf_counter() - started
