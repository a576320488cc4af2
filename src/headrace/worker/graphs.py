"""GraphLauncher: steps as CUDA graphs: decode steps, and mixed ones where sending their kernels one by one takes the
host longer than the GPU needs to run them.

A graph holds a whole step, from the request table back into it: inputs, forward pass, head, draw, commit. It is
captured from a step of padding only, in which every kernel finds nothing to do, so capturing needs no request and
disturbs none. A step runs in the next larger graph, whose kernels skip the padding.

**When a graph is captured.** The smallest decode steps' are at start. Of every other key what its steps have lost for
want of a graph is added up: the time of such a step, which is what the host took to send it or the GPU to run it,
whichever is longer, less the least that a replay of a smaller step of the kind took. A capture takes time too, as the
latest ones did in the middle. How often a key will come again nobody knows; the guess that is never wrong by more than
a factor of two is: as often as it has come, as with skis that one rents or buys (Karlin, Manasse, Rudolph and Sleator,
Competitive snoopy caching, 1988). So

- while requests run, a graph is captured once its key has lost what the capture takes;
- in idle moments, which nobody waits for, once it has lost a tenth of that, the greatest loss first, one at a time.

Steps of prompts count only where the host was what bound them: a graph gains nothing else there. Steps for which a
kernel was compiled do not count.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

# tokens of steps of short spans, as those that verify drafts: a quarter more from one to the next
SHORT = (2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 22, 27, 33, 41, 51, 64, 80, 100, 125, 156, 195, 244, 305, 381, 476)
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)  # of mixed steps; larger ones bind the GPU
AT_START = 16  # rows up to which graphs are captured before the first request, where they save the most
HITS_TO_CAPTURE = 2  # of keys of whose steps nobody tells how long they took
FIRST_COST = 0.1  # seconds that a capture is taken to need before one was made
IDLE_SHARE = 0.1  # of a capture's cost, that has to be lost before one is made in an idle moment
CLEARLY = 0.1  # of a step: a graph that would save less changes little of what its steps take
HOST_BOUND = 0.8  # sending took so much of the time that the GPU took, or more: the host is what a step waits for


@dataclass(frozen=True)
class GraphKey:
    """What a graph is good for."""

    num_rows: int  # padded
    num_tokens: int  # padded; of a decode step as many as rows
    warm: bool  # rows may have a temperature
    cut: bool  # rows may have top_k, top_p or min_p
    short: bool = False  # spans are short and may end in drafts: every token has a line of logits
    tree: bool = False  # and some of them are token trees
    far: bool = False  # and their contexts are so long that the kernel for whole steps is not for them

    @property
    def decodes(self) -> bool:
        """Every span has one token."""
        return self.num_tokens == self.num_rows and not self.short


@dataclass
class GraphCounts:
    """What the graphs did so far."""

    replays: int = 0
    eager: int = 0  # steps that a graph could have served
    tokens: int = 0  # of steps that ran padded
    padding: int = 0  # tokens beside them
    captures: int = 0
    idle_captures: int = 0  # of them
    capture_seconds: float = 0.0
    lost_seconds: float = 0.0  # by steps that had no graph, as it is estimated

    def lines(self) -> list[str]:
        """What a person wants to know of them; nothing where there was no step for them."""
        steps = self.replays + self.eager
        if not steps:
            return []
        padded = f", {self.padding / (self.tokens + self.padding):.0%} of their tokens padding" if self.tokens else ""
        return [
            f"graphs: {self.replays} of {steps} steps ({self.replays / steps:.0%}) were replayed{padded}; "
            f"{self.captures} captured in {self.capture_seconds:.2f} s, {self.idle_captures} of them in idle moments; "
            f"steps without one lost about {self.lost_seconds:.2f} s"
        ]


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
        self._costs: deque[float] = deque(maxlen=9)  # seconds of the latest captures
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
        if not self._repays(key) or not self._capture(key):
            self.counts.eager += 1
            return False
        return True

    def _repays(self, key: K) -> bool:
        """Whether a graph for a step that is about to run is worth its capture."""
        self._hits[key] = self._hits.get(key, 0) + 1
        return self._hits[key] >= HITS_TO_CAPTURE

    def run(self, key: K, num_tokens: int) -> None:
        """Run the step whose content has been sent."""
        self.counts.padding += key.num_tokens - num_tokens
        self.counts.tokens += num_tokens
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

    def forget(self, stale: Callable[[K], bool]) -> None:
        """Drop graphs that are to be captured anew; no step may be in flight."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if not stale(key)}

    def _capture(self, key: K) -> bool:
        """Whether it could be done; if not, no graph is tried again, and why is said once."""
        started = time.perf_counter()
        try:
            self._record(key)
        except RuntimeError as error:  # memory that ran out, an operation that no graph can hold
            self._capturing_failed = str(error).splitlines()[0]
            print(f"headrace: goes on without more CUDA graphs: {self._capturing_failed}", file=sys.stderr)
            return False
        seconds = time.perf_counter() - started
        self._costs.append(seconds)
        self.counts.captures += 1
        self.counts.capture_seconds += seconds
        return True

    def _record(self, key: K) -> None:
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
        trees: bool = False,
    ):
        """See Graphs. `most_short`: tokens of the largest step of short spans, 0 if there are none; `trees`: drafts may
        be token trees."""
        super().__init__(body, idle, enabled, capturing)
        self._rows = [size for size in ROWS if size < max_rows] + [max_rows]
        self._mixed_rows = [*self._rows[:-1], max_rows + 1]  # of mixed steps, which have one span more, for the padding
        self._tokens = [size for size in TOKENS if size < max_tokens] + [max_tokens] * (max_tokens <= TOKENS[-1])
        self._short = [size for size in SHORT if size < most_short]
        self._short += [most_short] * (0 < most_short <= SHORT[-1])
        self._trees = trees
        self._lost: dict[GraphKey, float] = {}  # seconds, by steps that had no graph
        self._least: dict[tuple[bool, bool], dict[int, float]] = {}  # kind -> tokens -> seconds of the fastest replay

    def pick(self, num_rows: int, num_tokens: int, warm: bool, cut: bool) -> GraphKey | None:
        """The key that a step of so many spans and tokens could run under; None: there is no graph so large."""
        if not self.enabled:
            return None
        if num_rows == num_tokens:
            rows = next(size for size in self._rows if size >= num_rows)
            return GraphKey(rows, rows, warm, cut)
        # a span of padding takes the tokens that are left over
        rows = next((size for size in self._mixed_rows if size > num_rows), 0)
        tokens = next((size for size in self._tokens if size >= max(num_tokens, rows + 1)), 0)
        return GraphKey(rows, tokens, warm, cut) if rows and tokens else None

    def pick_short(
        self, num_rows: int, num_tokens: int, warm: bool, cut: bool, tree: bool = False, far: bool = False
    ) -> GraphKey | None:
        """The same for a step of short spans, which may have drafts to verify, some of them a `tree`."""
        if not self.enabled:
            return None
        rows = next((size for size in self._rows if size >= num_rows), 0)
        tokens = next((size for size in self._short if size >= num_tokens), 0)
        # and one span that takes the tokens left over
        return GraphKey(rows + 1, tokens, warm, cut, True, tree, far) if rows and tokens else None

    @property
    def rows(self) -> list[int]:
        """Sizes of decode steps."""
        return list(self._rows)

    def other_keys(self) -> Iterator[GraphKey]:
        """Keys of steps that are not decode steps: one for each number of tokens, and for each kind of drawing."""
        for warm, cut in ((False, False), (True, False), (True, True)):
            for tokens in self._short:
                rows = max((size for size in self._rows if size < tokens), default=1)
                for tree in (False, True)[: 1 + self._trees]:
                    yield GraphKey(rows + 1, tokens, warm, cut, True, tree)
            for tokens in self._tokens:
                rows = next((size for size in self._rows if 1 < size < tokens), 0)
                if rows:
                    yield GraphKey(rows, tokens, warm, cut)
        if self._tokens and self._tokens[-1] > self._mixed_rows[-1]:  # of a full table, whose plan is cut by a kernel
            yield GraphKey(self._mixed_rows[-1], self._tokens[-1], False, False)  # of its own size

    def prepare(self) -> None:
        """Capture the graphs of small greedy decode steps that are not there."""
        if self.enabled and self._capturing:
            for size in self._rows:
                key = GraphKey(size, size, False, False)
                if size <= AT_START and self._capturing_failed is None and key not in self._graphs:
                    self._capture(key)

    def observe(self, key: GraphKey, replayed: bool, sent: float, ran: float) -> bool:
        """A step that a graph could have served, or did, took the host `sent` seconds to send, the GPU `ran` to run.
        Whether such steps will clearly take less: there will be a graph, since so much is lost that it repays soon."""
        kind = (key.decodes, key.short)
        if replayed:
            least = self._least.setdefault(kind, {})
            least[key.num_tokens] = min(ran, least.get(key.num_tokens, ran))
            return False
        if not (key.decodes or key.short) and sent <= HOST_BOUND * ran:
            return False
        smaller = (least for size, least in self._least.get(kind, {}).items() if size <= key.num_tokens)
        loss = max(0.0, max(sent, ran) - max(smaller, default=0.0))
        self._lost[key] = self._lost.get(key, 0.0) + loss
        self.counts.lost_seconds += loss
        return self._capturing and self._capturing_failed is None and loss > CLEARLY * max(sent, ran)

    @property
    def cost(self) -> float:
        """Seconds that a capture takes, as the latest ones did: the middle one, for the first ones compile kernels."""
        return statistics.median(self._costs) if self._costs else FIRST_COST

    def _repays(self, key: GraphKey) -> bool:
        return self._lost.get(key, 0.0) >= self.cost

    def capture_idle(self) -> bool:
        """Nothing runs: capture the graph whose want has cost most, if it has cost enough. Whether one was."""
        if not (self.enabled and self._capturing) or self._capturing_failed is not None:
            return False
        lost = {key: seconds for key, seconds in self._lost.items() if key not in self._graphs}
        key = max(lost, key=lambda key: lost[key], default=None)
        if key is None or lost[key] < IDLE_SHARE * self.cost or not self._capture(key):
            return False
        self.counts.idle_captures += 1
        return True
