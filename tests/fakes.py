"""Fakes for tests of the core: a runner whose next token is a pure function of the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import Request
from headrace.sampling.params import SamplingParams

VOCAB = 97


def next_token(tokens: list[int], seed: int = 0) -> int:
    """The fake model: depends on every token before it."""
    value = seed
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return value % VOCAB


class FakeRunner:
    """Keeps rows as a worker would, refuses reads of slots that were never written, and answers at once.

    Its cache holds (token, position) per slot, so a block given to two requests at a time, or reused too early, shows
    as a wrong token.
    """

    def __init__(self, block_size: int, windows: Sequence[int | None] = (None,)):
        self.block_size = block_size
        self.rows: dict[int, dict] = {}
        self.cache: dict[tuple[int, int], tuple[int, int]] = {}  # (block, offset) -> (token, position)
        self.windows = windows
        self.num_run = 0  # tokens
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        self.plans.append(plan)
        for row in plan.released:
            self.rows.pop(row, None)
        for admit in plan.admits:
            assert admit.row not in self.rows, f"row {admit.row} is taken"
            self.rows[admit.row] = {
                "tokens": list(admit.token_ids),
                "computed": admit.num_computed,
                "tables": [[] for _ in self.windows],
                "seed": admit.seed,
            }
        for new in plan.new_blocks:
            table = self.rows[new.row]["tables"][new.group]
            assert len(table) >= new.start
            table[new.start : new.start + len(new.ids)] = new.ids
        for source, destination in plan.block_copies:
            for offset in range(self.block_size):
                if (source, offset) in self.cache:
                    self.cache[destination, offset] = self.cache[source, offset]
        tokens, accepted = [], []
        for row, start, length, _ in plan.spans.T.tolist():
            state = self.rows[row]
            assert start == state["computed"], f"span starts at {start}, {state['computed']} computed"
            end = start + length
            assert end <= len(state["tokens"])
            self.num_run += length
            for window, table in zip(self.windows, state["tables"], strict=True):
                for position in range(start, end):
                    block = table[position // self.block_size]
                    self.cache[block, position % self.block_size] = (state["tokens"][position], position)
                for position in range(0 if window is None else max(0, start - window + 1), end):
                    seen = self.cache[table[position // self.block_size], position % self.block_size]
                    assert seen == (state["tokens"][position], position), "the cache holds another request's tokens"
            state["computed"] = end
            new = []
            if end == len(state["tokens"]):
                new = [next_token(state["tokens"], state["seed"])]
                state["tokens"].extend(new)
            tokens.append(new)
            accepted.append(0)
        future: Future[StepResult] = Future()
        future.set_result(StepResult(plan.step_id, tokens, accepted))
        return future


def expected_output(prompt: list[int], max_tokens: int, stop_ids: frozenset[int] = frozenset(), seed: int = 0):
    """What a request must produce, alone or not."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def make_request(request_id: str, prompt: list[int], max_tokens: int, **kwargs) -> Request:
    return Request(request_id, prompt, SamplingParams(max_tokens=max_tokens), max_new_tokens=max_tokens, **kwargs)
