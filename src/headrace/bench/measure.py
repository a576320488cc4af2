"""Timed work on an engine: the same prompts and lengths for everyone, so that peers can be given them too."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.frontend.llm import LLM
from headrace.sampling.params import SamplingParams

_runs = itertools.count()


@dataclass(frozen=True)
class Timing:
    """One run: seconds until any and until every request had its first token, and the tokens that were there by then;
    seconds and tokens in all."""

    first_token: float
    all_started: float
    tokens_by_then: int
    total: float
    num_tokens: int

    @property
    def decode_rate(self) -> float:
        """Tokens per second once every request has its first one: no prompt is read any more."""
        rest = self.num_tokens - self.tokens_by_then
        return rest / (self.total - self.all_started) if rest and self.total > self.all_started else 0.0

    @property
    def output_rate(self) -> float:
        """Tokens per second over the whole run, prefill included."""
        return self.num_tokens / self.total


def random_prompts(vocab_size: int, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` random token ids, away from the special ones at the start of a vocabulary."""
    draw = random.Random(seed)
    low = min(1000, vocab_size // 4)
    return [[draw.randrange(low, vocab_size) for _ in range(length)] for _ in range(count)]


def run_batch(llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> Timing:
    """Generate exactly `num_tokens` greedy tokens for each prompt, all submitted at once. No run finds the prefixes of
    another: each has a cache salt of its own."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    salt = f"run {next(_runs)}"
    started = time.perf_counter()
    outputs = [llm.engine.submit(prompt, params, cache_salt=salt) for prompt in prompts]
    first = all_started = 0.0
    by_then = 0

    def count() -> int:
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    while any(not output.finished for output in outputs):
        if not llm.engine.step() or all_started:
            continue
        now = time.perf_counter() - started
        first = first or now
        if all(output.outputs[0].token_ids for output in outputs):
            all_started, by_then = now, count()
    return Timing(first, all_started, by_then, time.perf_counter() - started, count())


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
