"""The whole of `headrace bench serve`: one run or a search for the highest rate, on one server or two in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.bench.results import Row
from headrace.bench.serving.client import Client
from headrace.bench.serving.load import Pattern, Run, measure_scale, run
from headrace.bench.serving.plot import Chart, cumulative
from headrace.bench.serving.summary import PERCENTILES, Objective, Summary, summarise
from headrace.bench.serving.workload import TokensPerWord, Workload

Tell = Callable[[str], None]
ENOUGH_GOOD = 0.9  # part of the requests that must keep the objective for a rate to be sustained
_DOUBLINGS, _HALVINGS = 10, 5
_LEAST_PROBE = 16  # requests; a rate at which they take longer than _LONGEST probes is not tried
_LONGEST = 4


@dataclass
class Server:
    """One that is measured, and what was found. Of two, the first is `headrace` in results."""

    name: str
    client: Client
    scale: TokensPerWord | None = None
    runs: list[tuple[Run, Summary]] = field(default_factory=list)

    async def measure(self, workload: Workload, pattern: Pattern, objective: Objective) -> Summary:
        assert self.scale is not None
        found = await run(self.client, workload.conversations(self.scale), pattern)
        self.runs.append((found, summarise(found, objective)))
        return self.runs[-1][1]


async def prepare(servers: Sequence[Server]) -> None:
    """Learn how the first counts tokens, which warms each up too; then all get the same texts. ServerError if one does
    not answer."""
    for server in servers:
        server.scale = await measure_scale(server.client)
    for server in servers[1:]:
        server.scale = servers[0].scale


async def in_turns(
    servers: Sequence[Server], workload: Workload, pattern: Pattern, objective: Objective, runs: int, tell: Tell
) -> list[Summary]:
    """Each server `runs` times, by turns; of each the run with the middle output rate."""
    found: dict[str, list[Summary]] = {server.name: [] for server in servers}
    for number in range(runs):
        for server in servers:
            # other prompts in each run, or a prefix cache would have them already
            seeded = replace(workload, seed=workload.seed + number)
            summary = await server.measure(seeded, pattern, objective)
            tell(f"{server.name}, {pattern.label}, run {number + 1}: {summary.output_rate:.1f} tokens/s")
            found[server.name].append(summary)
    return [_middle(found[server.name]) for server in servers]


def _middle(summaries: list[Summary]) -> Summary:
    return sorted(summaries, key=lambda summary: summary.output_rate)[len(summaries) // 2]


@dataclass(frozen=True)
class Probe:
    """One rate that was tried."""

    rate: float
    summary: Summary

    @property
    def sustained(self) -> bool:
        return self.summary.good >= ENOUGH_GOOD


async def saturate(
    server: Server, workload: Workload, pattern: Pattern, objective: Objective, seconds: float, tell: Tell
) -> list[Probe]:
    """Rates from `pattern.rate` on, doubled until fewer than ENOUGH_GOOD of the requests keep the objective (or halved
    until enough do), then halved between; each for about `seconds`. In the order they were tried."""
    if pattern.arrivals == "closed":
        pattern = replace(pattern, arrivals="poisson")
    probes: list[Probe] = []

    async def sustains(rate: float) -> bool:
        count = max(_LEAST_PROBE, round(rate * seconds))
        tried = replace(workload, count=count, seed=workload.seed + 1 + len(probes))
        summary = await server.measure(tried, replace(pattern, rate=rate, seed=pattern.seed + len(probes)), objective)
        probes.append(Probe(rate, summary))
        tell(f"{server.name}: {rate:.2f} requests/s, {summary.good:.0%} good")
        return probes[-1].sustained

    low, high = 0.0, pattern.rate
    if await sustains(high):
        for _ in range(_DOUBLINGS):
            low, high = high, high * 2
            if not await sustains(high):
                break
        else:
            return probes
    else:
        for _ in range(_DOUBLINGS):
            high /= 2
            if _LEAST_PROBE / high > _LONGEST * seconds:
                return probes
            if await sustains(high):
                low, high = high, high * 2
                break
        else:
            return probes
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if high - low < 0.08 * high:
            break
        low, high = (middle, high) if await sustains(middle) else (low, middle)
    return probes


def highest(probes: Sequence[Probe]) -> float:
    """The highest rate that was sustained; 0 if none was."""
    return max((probe.rate for probe in probes if probe.sustained), default=0.0)


def rows(
    model: str, workload: Workload, pattern: Pattern, summaries: Sequence[Summary], peer: str | None, runs: int,
    objective: Objective,
) -> list[Row]:  # fmt: skip
    """Of one pattern, in the form of results files; the second summary is the peer's."""
    what = f"{model} serve {workload.label} {pattern.label}"
    own, other = summaries[0], summaries[1] if len(summaries) > 1 else None

    def row(case: str, unit: str, better: Any, value: Callable[[Summary], float | None]) -> Row | None:
        mine, theirs = value(own), None if other is None else value(other)
        if mine is None or (other is not None and not theirs):
            return None
        return Row(f"{what} {case}", unit, better, mine, theirs, peer if theirs is not None else None, runs=runs)

    made = [
        row("output", "tok/s", "higher", lambda s: s.output_rate),
        row("requests", "1/s", "higher", lambda s: s.request_rate),
    ]
    for name in ("ttft", "tpot", "itl", "e2e"):
        for each in PERCENTILES:

            def value(s: Summary, name: str = name, each: int = each) -> float | None:
                values: Mapping[int, float] = getattr(s, name)
                return values.get(each)

            made.append(row(f"{name} p{each}", "ms", "lower", value))
    if objective.label:
        made.append(row(f"goodput ({objective.label})", "1/s", "higher", lambda s: s.goodput))
    return [each for each in made if each is not None]


def charts(servers: Sequence[Server]) -> list[Chart]:
    """Distributions of latency over all runs of each server."""

    def lines(value: Callable[[Run], list[float]]) -> dict[str, list[tuple[float, float]]]:
        found = {s.name: [each * 1e3 for done, _ in s.runs for each in value(done)] for s in servers}
        return {name: cumulative(values) for name, values in found.items() if values}

    part = "part of all"
    return [
        Chart("Time to first token", "ms", part, lines(lambda r: [a.ttft for a in r.whole]), 1.0),
        Chart("Time a token after it", "ms", part, lines(lambda r: [a.tpot for a in r.whole if a.tpot]), 1.0),
        Chart("Whole request", "ms", part, lines(lambda r: [a.ended for a in r.whole]), 1.0),
    ]


def saturation_charts(found: Mapping[str, Sequence[Probe]]) -> list[Chart]:
    """What happened at each rate."""

    def lines(value: Callable[[Summary], float]) -> dict[str, list[tuple[float, float]]]:
        return {n: [(p.rate, value(p.summary)) for p in sorted(ps, key=lambda p: p.rate)] for n, ps in found.items()}

    return [
        Chart("Requests that keep the objective", "requests/s", "part", lines(lambda s: s.good), 1.0),
        Chart("First token, p90", "requests/s", "ms", lines(lambda s: s.ttft.get(90, float("nan")))),
        Chart("Output", "requests/s", "tokens/s", lines(lambda s: s.output_rate)),
    ]
