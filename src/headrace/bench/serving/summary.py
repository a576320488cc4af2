"""What a run says: percentiles of latency, rates, and goodput under an objective."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.bench.serving.client import Answer
from headrace.bench.serving.load import Run

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Objective:
    """Latencies in seconds that an answer must keep to be good; None: any."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def keeps(self, answer: Answer) -> bool:
        tpot = answer.tpot
        return not answer.error and all(
            limit is None or value is None or value <= limit
            for limit, value in ((self.ttft, answer.ttft), (self.tpot, tpot), (self.e2e, answer.ended))
        )

    @property
    def label(self) -> str:
        named = (("ttft", self.ttft), ("tpot", self.tpot), ("e2e", self.e2e))
        return ", ".join(f"{name} {limit * 1e3:g} ms" for name, limit in named if limit is not None)


@dataclass(frozen=True)
class Summary:
    """Latencies in milliseconds by percentile; rates a second."""

    requests: int
    failed: int
    errors: tuple[str, ...]  # the commonest, with their numbers
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: dict[int, float]
    tpot: dict[int, float]
    itl: dict[int, float]
    e2e: dict[int, float]
    good: float  # part of all requests that kept the objective

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def request_rate(self) -> float:
        return (self.requests - self.failed) / self.seconds if self.seconds else 0.0

    @property
    def goodput(self) -> float:
        """Requests a second that kept the objective."""
        return self.good * self.requests / self.seconds if self.seconds else 0.0

    def lines(self) -> list[str]:
        """For people."""
        text = [
            f"{self.requests} requests in {self.seconds:.1f} s, {self.failed} failed; "
            f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), {self.output_tokens} generated",
            f"{self.request_rate:.2f} requests/s, {self.output_rate:.1f} tokens/s, "
            f"{self.good:.0%} good: {self.goodput:.2f} requests/s",
            "ms          " + "".join(f"{'p' + str(each):>10}" for each in PERCENTILES),
        ]
        for name in ("ttft", "tpot", "itl", "e2e"):
            values: dict[int, float] = getattr(self, name)
            text.append(f"{name:12}" + "".join(f"{values[each]:10.1f}" for each in PERCENTILES if values))
        return text + [f"failed: {error}" for error in self.errors]

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**plain, "output_rate": self.output_rate, "request_rate": self.request_rate, "goodput": self.goodput}


def percentile(values: Sequence[float], share: float) -> float:
    """Of sorted values, the nearest above; `share` is of 100."""
    return values[max(0, math.ceil(len(values) * share / 100) - 1)]


def summarise(run: Run, objective: Objective) -> Summary:
    """Failed requests count against goodput and in nothing else."""
    whole = run.whole

    def of(values: list[float]) -> dict[int, float]:
        ordered = sorted(values)
        return {each: percentile(ordered, each) * 1e3 for each in PERCENTILES} if ordered else {}

    errors = Counter(answer.error for answer in run.failed).most_common(3)
    return Summary(
        requests=len(run.answers),
        failed=len(run.failed),
        errors=tuple(f"{count} x {error}" for error, count in errors),
        seconds=run.seconds,
        prompt_tokens=sum(answer.prompt_tokens or 0 for answer in whole),
        cached_tokens=sum(answer.cached_tokens or 0 for answer in whole),
        output_tokens=sum(answer.tokens for answer in whole),
        ttft=of([answer.ttft for answer in whole]),
        tpot=of([answer.tpot for answer in whole if answer.tpot is not None]),
        itl=of([gap for answer in whole for gap in answer.gaps]),
        e2e=of([answer.ended for answer in whole]),
        good=sum(objective.keeps(answer) for answer in run.answers) / max(1, len(run.answers)),
    )
