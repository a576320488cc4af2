"""Fakes for tests of the core: a runner whose next token is a pure function of the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from headrace.core.plan import StepPlan, StepResult
from headrace.core.request import Request
from headrace.sampling.params import SamplingParams

VOCAB = 97


def _hash(tokens: list[int], seed: int) -> int:
    value = seed
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return value


def next_token(tokens: list[int], seed: int = 0) -> int:
    """The fake model: depends on every token before it."""
    return _hash(tokens, seed) % VOCAB


def candidates(tokens: list[int], count: int) -> list[tuple[int, float]]:
    """The fake model's best next tokens for a beam search."""
    first = next_token(tokens)
    # 40 bits of hash: sums of two sequences hardly ever tie, and the order of ties is nobody's promise
    values = [_hash(tokens, 1000 + 77 * i) * 1_000_003 + _hash(tokens[::-1], 5 + 31 * i) for i in range(count)]
    found = [((first + 13 * i) % VOCAB, -(1 + value) / 4e11) for i, value in enumerate(values)]
    return sorted(found, key=lambda pair: -pair[1])


def expected_beams(prompt, max_tokens, width, length_penalty, early_stopping, stop_ids):
    """A beam search written down plainly: (score, output) of each hypothesis, best first."""
    live, ended = [(0.0, [])], []
    for length in range(1, max_tokens + 1):
        offers = [
            (total + logprob, tokens, token)
            for total, tokens in live
            for token, logprob in candidates(prompt + tokens, width * max(2, 1 + len(stop_ids)))
        ]
        offers.sort(key=lambda offer: -offer[0])
        live = []
        for place, (total, tokens, token) in enumerate(offers):
            if token in stop_ids or length == max_tokens:
                if place < width:
                    ended.append((total / length**length_penalty, [*tokens, token]))
            elif len(live) < width:
                live.append((total, [*tokens, token]))
        ended = sorted(ended, key=lambda pair: -pair[0])[:width]
        if len(ended) == width and (early_stopping or (live and live[0][0] / length**length_penalty <= ended[-1][0])):
            break
    return ended


class FakeRunner:
    """Keeps rows as a worker would, refuses reads of slots that were never written, and answers at once.

    Its cache holds (token, position) per slot, so a block given to two requests at a time, or reused too early, shows
    as a wrong token.
    """

    def __init__(self, block_size: int, windows: Sequence[int | None] = (None,), num_drafts: int = 0):
        self.block_size = block_size
        self.rows: dict[int, dict] = {}
        self.cache: dict[tuple[int, int], tuple[int, int]] = {}  # (block, offset) -> (token, position)
        self.windows = windows
        self.num_run = 0  # tokens
        self.num_drafts = num_drafts  # proposed after each token, right and wrong ones
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
                "candidates": (admit.params.beam_width or 0) * max(2, 1 + len(admit.stop_ids)),
            }
        before = {fork.source: self.rows[fork.source] for fork in plan.forks}
        for fork in plan.forks:
            source = before[fork.source]
            tokens = [*source["tokens"][:-1], fork.token]
            tables = [list(table) for table in source["tables"]]
            self.rows[fork.row] = {**source, "tokens": tokens, "tables": tables}
        for new in plan.new_blocks:
            table = self.rows[new.row]["tables"][new.group]
            assert len(table) >= new.start
            table[new.start : new.start + len(new.ids)] = new.ids
        for source, destination in plan.block_copies:
            for offset in range(self.block_size):
                if (source, offset) in self.cache:
                    self.cache[destination, offset] = self.cache[source, offset]
        verifies = bool(plan.num_drafts.any())
        # every third time nothing can draft between runs
        num_runs = 1 if verifies and plan.step_id % 3 == 0 else plan.num_runs
        tokens, by_run, offered, proposed = [], [], {}, []
        for index, (row, start, length, num_drafts) in enumerate(plan.spans.T.tolist()):
            state, drawn, accepted = self.rows[row], [], []
            for run in range(num_runs):
                new = self._run(state, state["computed"] if run else start, length, num_drafts, offered, index)
                accepted.append(max(0, len(new) - 1))
                drawn += new
            tokens.append(drawn)
            by_run.append(accepted)
            proposed.append(len(state["drafts"]))
        future: Future[StepResult] = Future()
        result = StepResult(
            plan.step_id,
            tokens,
            num_accepted=list(map(sum, by_run)),
            num_runs=num_runs,
            accepted_by_run=by_run if verifies and num_runs > 1 else [],
            candidates=offered,
            num_drafts=proposed,
        )
        future.set_result(result)
        return future

    def _run(self, state, start: int, length: int, num_drafts: int, offered: dict, index: int) -> list[int]:
        """One run of span `index`: the tokens that it brings."""
        drafts = state.pop("drafts", [])[:num_drafts]
        assert len(drafts) == num_drafts, "a step verifies drafts that were not proposed"
        known = [*state["tokens"], *drafts]
        assert start == state["computed"], f"span starts at {start}, {state['computed']} computed"
        end = start + length
        assert end <= len(known)
        self.num_run += length
        for window, table in zip(self.windows, state["tables"], strict=True):
            for position in range(start, end):
                block = table[position // self.block_size]
                self.cache[block, position % self.block_size] = (known[position], position)
            for position in range(0 if window is None else max(0, start - window + 1), end):
                seen = self.cache[table[position // self.block_size], position % self.block_size]
                assert seen == (known[position], position), "the cache holds another request's tokens"
        new: list[int] = []
        if end == len(known):
            if state["candidates"]:
                offered[index] = candidates(state["tokens"], state["candidates"])
            for draft in [*drafts, None]:
                new.append(next_token(state["tokens"] + new, state["seed"]))
                if new[-1] != draft:
                    break
            state["tokens"].extend(new)
            end -= len(drafts) - (len(new) - 1)
        state["computed"] = end
        state["drafts"] = self._propose(state) if new and not state["candidates"] else []
        return new

    def _propose(self, state: dict) -> list[int]:
        """Right tokens, with a wrong one among them now and then."""
        drafts: list[int] = []
        for place in range(self.num_drafts):
            right = next_token(state["tokens"] + drafts, state["seed"])
            drafts.append((right + 1) % VOCAB if (right + place) % 5 == 0 else right)
        return drafts


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
