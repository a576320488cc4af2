"""GraphLauncher: steps as CUDA graphs: decode steps, and mixed ones where sending their kernels one by one takes the
host longer than the GPU needs to run them.

A graph holds a whole step, from the request table back into it: inputs, forward pass, head, draw, commit. It is
captured from a step of padding only, in which every kernel finds nothing to do, so capturing needs no request and
disturbs none. A step runs in the next larger graph, whose kernels skip the padding.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

# tokens of steps of short spans, as those that verify drafts: a quarter more from one to the next
SHORT = (2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 22, 27, 33, 41, 51, 64, 80, 100, 125, 156, 195, 244, 305, 381, 476)
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)  # of mixed steps; larger ones bind the GPU
AT_START = 16  # rows up to which graphs are captured before the first request, where they save the most
HITS_TO_CAPTURE = 2
HOST_BOUND = 0.8  # sending took so much of the time that the GPU took, or more: the host is what a step waits for


@dataclass(frozen=True)
class GraphKey:
    """What a graph is good for."""

    num_rows: int  # padded
    num_tokens: int  # padded; of a decode step as many as rows
    warm: bool  # rows may have a temperature
    cut: bool  # rows may have top_k, top_p or min_p
    short: bool = False  # spans are short and may end in drafts: every token has a line of logits

    @property
    def decodes(self) -> bool:
        """Every span has one token."""
        return self.num_tokens == self.num_rows and not self.short


@dataclass
class GraphCounts:
    """What the graphs did so far."""

    replays: int = 0
    eager: int = 0  # steps that a graph could have served
    padding: int = 0  # tokens
    captures: int = 0
    capture_seconds: float = 0.0


class Key(Protocol):
    """What a graph is found by; equal keys have equal graphs."""

    @property
    def decodes(self) -> bool: ...

    @property
    def short(self) -> bool: ...

    @property
    def num_tokens(self) -> int: ...


K = TypeVar("K", bound=Key)


class Graphs(Generic[K]):
    """Runs `body(key)` as a graph, or, where there can be none, as it is. It must use memory of fixed addresses."""

    def __init__(self, body: Callable[[K], None], idle: Callable[[K], None], enabled: bool, capturing: bool):
        """`idle(key)` makes what follows a step of padding only. Not `capturing`: bodies run padded, to be tested."""
        self._body, self._idle = body, idle
        self._graphs: dict[K, torch.cuda.CUDAGraph] = {}
        self._hits: dict[K, int] = {}
        self._pool: Any = None  # memory that all graphs share
        self._capturing = capturing
        self._capturing_failed: str | None = None
        self.enabled = enabled
        self.counts = GraphCounts()

    def serves(self, key: K) -> bool:
        """Whether a step is to run under `key`: there is a graph, or it is worth one, which is captured now. Must be
        asked before the step is sent: what the fixed buffers held is lost."""
        if not self._capturing or key in self._graphs:
            return True
        if self._capturing_failed is not None:
            return False
        if key.decodes or key.short:
            self._hits[key] = self._hits.get(key, 0) + 1
        if self._hits.get(key, 0) < HITS_TO_CAPTURE or not self._capture(key):
            self.counts.eager += 1
            return False
        return True

    def run(self, key: K, num_tokens: int) -> None:
        """Run the step whose content has been sent."""
        self.counts.padding += key.num_tokens - num_tokens
        graph = self._graphs.get(key)
        if graph is None:
            self._body(key)
            return
        self.counts.replays += 1
        graph.replay()

    def clear(self) -> None:
        """Forget every graph."""
        self._graphs.clear()
        self.enabled = False

    def _capture(self, key: K) -> bool:
        """Whether it could be done; if not, no graph is tried again, and why is said once."""
        try:
            self._record(key)
        except RuntimeError as error:  # memory that ran out, an operation that no graph can hold
            self._capturing_failed = str(error).splitlines()[0]
            self._hits.clear()
            print(f"headrace: goes on without more CUDA graphs: {self._capturing_failed}", file=sys.stderr)
            return False
        return True

    def _record(self, key: K) -> None:
        started = time.perf_counter()
        self._idle(key)
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


class GraphLauncher(Graphs[GraphKey]):
    """The graphs of steps, by their padded sizes."""

    def __init__(
        self,
        body: Callable[[GraphKey], None],
        idle: Callable[[GraphKey], None],
        max_rows: int,
        max_tokens: int,
        enabled: bool,
        capturing: bool,
        most_short: int = 0,
    ):
        """See Graphs. `most_short`: tokens of the largest step of short spans, 0 if there are none."""
        super().__init__(body, idle, enabled, capturing)
        self._rows = [size for size in ROWS if size < max_rows] + [max_rows]
        self._tokens = [size for size in TOKENS if size < max_tokens] + [max_tokens] * (max_tokens <= TOKENS[-1])
        self._short = [size for size in SHORT if size < most_short]
        self._short += [most_short] * (0 < most_short <= SHORT[-1])

    def pick(self, num_rows: int, num_tokens: int, warm: bool, cut: bool) -> GraphKey | None:
        """The key that a step of so many spans and tokens could run under; None: there is no graph so large."""
        if not self.enabled:
            return None
        if num_rows == num_tokens:
            rows = next(size for size in self._rows if size >= num_rows)
            return GraphKey(rows, rows, warm, cut)
        # a span of padding takes the tokens that are left over
        rows = next((size for size in self._rows if size > num_rows), 0)
        tokens = next((size for size in self._tokens if size >= max(num_tokens, rows + 1)), 0)
        return GraphKey(rows, tokens, warm, cut) if rows and tokens else None

    def pick_short(self, num_rows: int, num_tokens: int, warm: bool, cut: bool) -> GraphKey | None:
        """The same for a step of short spans, which may have drafts to verify."""
        if not self.enabled:
            return None
        rows = next((size for size in self._rows if size >= num_rows), 0)
        tokens = next((size for size in self._short if size >= num_tokens), 0)
        # and one span that takes the tokens left over
        return GraphKey(rows + 1, tokens, warm, cut, True) if rows and tokens else None

    @property
    def rows(self) -> list[int]:
        """Sizes of decode steps."""
        return list(self._rows)

    def other_keys(self) -> Iterator[GraphKey]:
        """Keys of steps that are not decode steps: one for each number of tokens, and for each kind of drawing."""
        for warm, cut in ((False, False), (True, False), (True, True)):
            for tokens in self._short:
                rows = max((size for size in self._rows if size < tokens), default=1)
                yield GraphKey(rows + 1, tokens, warm, cut, True)
            for tokens in self._tokens:
                rows = next((size for size in self._rows if 1 < size < tokens), 0)
                if rows:
                    yield GraphKey(rows, tokens, warm, cut)

    def prepare(self) -> None:
        """Capture the graphs of small greedy decode steps."""
        if self.enabled and self._capturing:
            for size in self._rows:
                if size <= AT_START and self._capturing_failed is None:
                    self._capture(GraphKey(size, size, False, False))

    def observe(self, key: GraphKey, sent: float, ran: float) -> None:
        """A mixed step that a graph could have served took the host `sent` seconds to send, the GPU `ran` to run."""
        if not (key.decodes or key.short) and sent > HOST_BOUND * ran:
            self._hits[key] = self._hits.get(key, 0) + 1
