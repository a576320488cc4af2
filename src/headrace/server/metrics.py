"""What Prometheus reads at /metrics. Names and units follow its conventions: seconds, _total for counters.

Requests are counted here, in the API process; what the engine counts comes with its messages (`Stats`) and is shown as
of the latest. An engine that is restarted counts from 0 again, so what its predecessors counted is added.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.frontend.ipc import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


@dataclass
class _Past:
    """What engines that are gone had counted."""

    numbers: Tally[str] = field(default_factory=Tally)
    seconds: dict[str, float] = field(default_factory=dict)
    steps: Tally[str] = field(default_factory=Tally)
    drafts: Tally[tuple[str, str, int]] = field(default_factory=Tally)  # (label, its value, 0 verified or 1 accepted)


def _by_position(stats: Stats) -> dict[str, list[int]]:
    """[verified, accepted] of each place in a draft, from "1" on."""
    return {str(place): pair for place, pair in enumerate(stats.draft_positions, 1)}


class _EngineCollector(Collector):
    """The engine's numbers, as of its latest message."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.up = 0
        self.restarts = 0
        self._past = _Past()

    def forget(self) -> None:
        """The engine is gone: its totals stay, its gauges fall to 0."""
        past, stats = self._past, self.stats
        past.numbers.update({name: getattr(stats, name) for name in _TOTALS})
        for bound, seconds in stats.seconds_by_bound.items():
            past.seconds[bound] = past.seconds.get(bound, 0.0) + seconds
        past.steps.update(stats.steps_by_bound)
        for label, counts in (("proposer", stats.drafts), ("position", _by_position(stats))):
            for name, pair in counts.items():
                past.drafts.update({(label, name, index): count for index, count in enumerate(pair)})
        self.stats, self.up = Stats(), 0

    def collect(self) -> Iterator[Metric]:
        stats, past = self.stats, self._past
        for name, text, value in (
            ("engine_up", "1 while an engine is ready", self.up),
            ("requests_running", "choices that have a row in the engine", stats.running),
            ("requests_waiting", "choices in the engine's queue", stats.waiting),
            ("kv_blocks", "blocks of KV cache", stats.blocks_total),
            ("kv_blocks_held", "blocks of KV cache that requests hold", stats.blocks_held),
            (
                "kv_use_ratio",
                "part of the KV cache that requests hold",
                stats.blocks_held / stats.blocks_total if stats.blocks_total else 0.0,
            ),
        ):
            yield GaugeMetricFamily(f"headrace_{name}", text, value=value)
        totals = {name: past.numbers[name] + getattr(stats, name) for name in _TOTALS}
        asked = totals["prompt_tokens"]
        yield GaugeMetricFamily(
            "headrace_prefix_hit_ratio",
            "part of the prompt tokens admitted that the prefix cache had",
            value=totals["cached_tokens"] / asked if asked else 0.0,
        )
        for name, text in _TOTALS.items():
            yield CounterMetricFamily(f"headrace_engine_{name}", text, value=totals[name])
        yield CounterMetricFamily("headrace_engine_restarts", "engines started again after a death", self.restarts)
        seconds = CounterMetricFamily("headrace_step_seconds", "time of steps by what bound them", labels=["bound"])
        steps = CounterMetricFamily("headrace_steps", "steps by what bound them", labels=["bound"])
        for bound in sorted(stats.seconds_by_bound.keys() | past.seconds.keys()):
            seconds.add_metric([bound], past.seconds.get(bound, 0.0) + stats.seconds_by_bound.get(bound, 0.0))
            steps.add_metric([bound], past.steps[bound] + stats.steps_by_bound.get(bound, 0))
        yield seconds
        yield steps
        for label, counts in (("proposer", stats.drafts), ("position", _by_position(stats))):
            for index, what in enumerate(("verified", "accepted")):
                family = CounterMetricFamily(
                    f"headrace_drafts_{what}_by_{label}", f"drafts that were {what}, by their {label}", labels=[label]
                )
                names = {*counts, *(key[1] for key in past.drafts if key[0] == label)}
                for name in sorted(names) or ["none"]:
                    now = counts[name][index] if name in counts else 0
                    family.add_metric([name], now + past.drafts[label, name, index])
                yield family


_TOTALS = {
    "steps": "steps of the model",
    "prompt_tokens": "prompt tokens admitted, each once",
    "cached_tokens": "of them, those that the prefix cache had",
    "preemptions": "choices that gave up their memory and were computed again",
    "draft_tokens": "tokens drafted by speculation and verified",
    "accepted_draft_tokens": "of them, those that were right",
    "draft_seconds": "time that proposing tokens took",
    "wasted_seconds": "time that steps are predicted to have taken longer for drafts that were wrong",
    "proposers_dropped": "proposers of drafts that failed and are asked no more",
}


class Metrics:
    """All of them, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine = _EngineCollector()
        self.registry.register(self.engine)
        self.requests = Counter(
            "headrace_requests",
            "requests to the API by how they ended: stop, length, aborted, rejected, timeout, error",
            ["route", "outcome"],
            registry=self.registry,
        )
        self.responses = Counter("headrace_http_responses", "responses by status", ["status"], registry=self.registry)
        self.prompt_tokens = Counter("headrace_prompt_tokens", "prompt tokens of requests", registry=self.registry)
        self.generated_tokens = Counter("headrace_generated_tokens", "tokens generated", registry=self.registry)
        self.first_token = self._histogram("time_to_first_token", "from the request to its first token", _LONG)
        self.inter_token = self._histogram("inter_token", "between tokens of a choice", _SHORT)
        self.output_token = self._histogram(
            "time_per_output_token", "a token after the first, on average over a choice", _SHORT
        )
        self.queue = self._histogram("queue", "that a choice waited to be admitted by the engine", _LONG)
        self.end_to_end = self._histogram("request", "from the request to its end", _LONG)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"headrace_{name}_seconds", f"seconds {text}", buckets=buckets, registry=self.registry)

    def render(self) -> bytes:
        """The whole page."""
        return generate_latest(self.registry)
