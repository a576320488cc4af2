"""`headrace bench serve`: how any server that speaks OpenAI's API does under load."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.bench.serving.bench import Server
    from headrace.bench.serving.load import Pattern
    from headrace.bench.serving.summary import Objective
    from headrace.bench.serving.workload import Workload

KEY_VARIABLE = "HEADRACE_API_KEY"
_KINDS = ("random", "sharegpt", "shared-prefix", "multi-turn")
_ARRIVALS = ("closed", "poisson", "bursty")


def add_command(kinds: Any) -> None:
    parser = kinds.add_parser(
        "serve",
        help="a running server of OpenAI's API under load",
        description="Measure any server of OpenAI's API under load: latency percentiles, rates, goodput, saturation.",
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", metavar="URL", help="the server (http://127.0.0.1:8000)")
    add("--peer-url", metavar="URL", help="another server, measured in turns with the first")
    add("--peer-name", metavar="NAME", help="how results call it, with its version")
    add("--model", metavar="NAME", help="the model to ask for (the first that the server names)")
    add("--completions", action="store_true", help="ask /v1/completions, not chat")
    add("--workload", choices=_KINDS, default="random", help="lengths and what prompts share (random)")
    add("--num-requests", type=int, default=64, metavar="N", help="conversations in a run (64)")
    add("--prompt-len", type=int, default=128, metavar="N", help="tokens of a prompt on average (128)")
    add("--output-len", type=int, default=64, metavar="N", help="tokens of an answer on average (64)")
    add("--spread", type=float, default=0.5, metavar="X", help="lengths vary by this part of them (0.5)")
    add("--prefix-len", type=int, default=512, metavar="N", help="shared-prefix: tokens shared (512)")
    add("--num-prefixes", type=int, default=4, metavar="N", help="shared-prefix: different prefixes (4)")
    add("--num-turns", type=int, default=4, metavar="N", help="multi-turn: turns of a conversation (4)")
    add("--arrivals", choices=_ARRIVALS, default="closed", help="closed loop, or as requests come (closed)")
    add("--clients", type=int, action="append", metavar="N", help="closed: at once (8); may be repeated")
    add("--rate", type=float, default=4.0, metavar="X", help="poisson, bursty: conversations a second (4)")
    add("--burstiness", type=float, default=0.25, metavar="X", help="bursty: shape of the gaps; below 1: clumps (0.25)")
    add("--seed", type=int, default=0, metavar="N", help="of lengths, words and arrivals (0)")
    add("--runs", type=int, default=1, metavar="N", help="runs; the one with the middle output rate counts (1)")
    add("--timeout", type=float, default=600.0, metavar="X", help="seconds that a request may take (600)")
    add("--ttft-slo", type=float, metavar="MS", help="objective: time to first token")
    add("--tpot-slo", type=float, metavar="MS", help="objective: time a token after it")
    add("--e2e-slo", type=float, metavar="MS", help="objective: whole request")
    add("--saturate", action="store_true", help="search the highest rate at which 90%% keep the objectives")
    add("--seconds", type=float, default=20.0, metavar="X", help="saturate: length of each try (20)")
    add("--json", metavar="FILE", help="write a results file")
    add("--plot", metavar="FILE", help="write charts as SVG")
    parser.set_defaults(command=serve)


def serve(arguments: argparse.Namespace) -> int:
    import asyncio

    return asyncio.run(_serve(arguments))


async def _serve(arguments: argparse.Namespace) -> int:
    from headrace.bench.results import write_results
    from headrace.bench.serving import bench
    from headrace.bench.serving.plot import write_svg

    workload, patterns, objective = _settings(arguments)
    for path in (arguments.json, arguments.plot):
        if path and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"there is no folder for {path}; make it first")
    servers = _servers(arguments)
    await bench.prepare(servers)
    model = Path(await servers[0].client.model()).stem

    def tell(text: str) -> None:
        print(f"[{text}]", file=sys.stderr, flush=True)

    made, details = [], []
    peer = servers[1].name if len(servers) > 1 else None
    charts = None
    if arguments.saturate:
        probes = {
            s.name: await bench.saturate(s, workload, patterns[0], objective, arguments.seconds, tell) for s in servers
        }
        for name, tries in probes.items():
            print(f"{name}: {bench.highest(tries):.2f} requests/s keep {objective.label} for 90 %")
            details += [{"server": name, "rate": each.rate, **each.summary.to_json()} for each in tries]
        made = _saturation_rows(model, workload, objective, [bench.highest(tries) for tries in probes.values()], peer)
        charts = bench.saturation_charts(probes)
    else:
        for pattern in patterns:
            summaries = await bench.in_turns(servers, workload, pattern, objective, arguments.runs, tell)
            for server, summary in zip(servers, summaries, strict=True):
                print(f"{server.name}, {workload.label}, {pattern.label}")
                print("\n".join(f"  {line}" for line in summary.lines()))
                details.append({"server": server.name, "pattern": pattern.label, **summary.to_json()})
            made += bench.rows(model, workload, pattern, summaries, peer, arguments.runs, objective)
        charts = bench.charts(servers)
    late = max(run.late for server in servers for run, _ in server.runs)
    if late > 0.05:
        tell(f"requests were sent up to {late:.2f} s late: this client is the limit")
    if arguments.json:
        write_results(arguments.json, "serve", made, more={"details": details})
    if arguments.plot:
        write_svg(arguments.plot, charts)
    failed = sum(each["failed"] for each in details)
    return 1 if failed and failed == sum(each["requests"] for each in details) else 0


def _settings(arguments: argparse.Namespace) -> tuple[Workload, list[Pattern], Objective]:
    from headrace.bench.serving.load import Pattern
    from headrace.bench.serving.summary import Objective
    from headrace.bench.serving.workload import Workload

    for name in ("runs", "timeout", "seconds", "rate", "burstiness", "ttft_slo", "tpot_slo", "e2e_slo"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, and finite")
    workload = Workload(
        kind=arguments.workload, count=arguments.num_requests, prompt_len=arguments.prompt_len,
        output_len=arguments.output_len, spread=arguments.spread, prefix_len=arguments.prefix_len,
        num_prefixes=arguments.num_prefixes, num_turns=arguments.num_turns, seed=arguments.seed,
    )  # fmt: skip
    clients = (arguments.clients or [8]) if arguments.arrivals == "closed" else [1]
    if any(count < 1 for count in clients):
        raise ValueError("--clients must be at least 1")
    patterns = [
        Pattern(
            arrivals=arguments.arrivals, clients=count, rate=arguments.rate, burstiness=arguments.burstiness,
            seed=arguments.seed,
        )
        for count in clients
    ]  # fmt: skip
    limits = [
        None if each is None else each / 1e3 for each in (arguments.ttft_slo, arguments.tpot_slo, arguments.e2e_slo)
    ]
    objective = Objective(*limits)
    if arguments.saturate and not objective.label:
        raise ValueError("--saturate needs an objective: --ttft-slo, --tpot-slo or --e2e-slo")
    return workload, patterns, objective


def _servers(arguments: argparse.Namespace) -> list[Server]:
    from headrace.bench.serving.bench import Server
    from headrace.bench.serving.client import Client

    def server(name: str, url: str) -> Server:
        key = os.environ.get(KEY_VARIABLE)
        chat = not arguments.completions
        return Server(name, Client(url, model=arguments.model, key=key, chat=chat, timeout=arguments.timeout))

    found = [server("headrace" if arguments.peer_url else "server", arguments.url)]
    if arguments.peer_url:
        found.append(server(arguments.peer_name or "peer", arguments.peer_url))
    return found


def _saturation_rows(
    model: str, workload: Workload, objective: Objective, rates: list[float], peer: str | None
) -> list[Any]:
    from headrace.bench.results import Row

    case = f"{model} serve {workload.label} saturation ({objective.label})"
    other = rates[1] if len(rates) > 1 and rates[1] else None
    return [Row(case, "1/s", "higher", rates[0], other, peer if other else None)]
