"""An engine for minutes under whatever comes: arrivals, lengths, options, priorities and aborts at random, and a KV
cache too small for them, first without and then with speculation.

    .venv/bin/python bench/soak.py [--device cuda] [--minutes 6] [-m MODEL] [--json bench/results/h200/soak.json]

It ends with exit code 1 unless, with each engine,

- every request ended by itself or by its abort, and none with an error;
- every block of KV cache and every row is accounted for, and none is held at the end;
- requests were preempted, so that there was pressure;
- anonymous memory of the process grew by at most --growth-mib from the end of the first third to the end, and by
  --graph-mib for each CUDA graph that was captured meanwhile, and memory of the GPU that torch has allocated by at most
  --device-growth-mib (graphs are captured as their want is seen);
- greedy requests, drawn from all that ended, have the same tokens when they run again alone, in a fresh engine without
  speculation. On a GPU a first difference is allowed where the two best tokens lie within 1e-3 (exact mode; log-
  probabilities), and counted.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.bench.results import write_results
from headrace.config import EngineArgs
from headrace.frontend.engine import Engine
from headrace.frontend.output import RequestOutput
from headrace.loading.checkpoint import open_checkpoint
from headrace.loading.store import resolve_model
from headrace.sampling.params import SamplingParams

MAX_LEN, MAX_SEQS, MAX_BATCHED = 384, 12, 128
KV_TOKENS = 2 * MAX_LEN  # of twelve requests at once
MOST_OUTSTANDING = 40
TIE = 1e-3
ENDS = {"length", "stop", "abort"}


@dataclass
class Kept:
    """A greedy request that ended, to be run again."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int]


@dataclass
class Watch:
    """What one engine's run came to."""

    seconds: float = 0.0
    submitted: int = 0
    aborted: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    preemptions: int = 0
    drafts: int = 0
    accepted: int = 0
    memory_mib: list[float] = field(default_factory=list)  # after a third, two thirds, at the end
    device_mib: list[float] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)  # captured by then
    compared: int = 0
    ties: int = 0
    faults: list[str] = field(default_factory=list)


def anonymous_mib() -> float:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("this system does not say how much memory a process has (/proc/self/status)")


def device_mib() -> float:
    """GPU memory that torch has handed out, 0 where it has no GPU or is not used."""
    torch = sys.modules.get("torch")
    return torch.cuda.memory_allocated() / 2**20 if torch is not None and torch.cuda.is_available() else 0.0


def make_engine(arguments: argparse.Namespace, speculate: str) -> Engine:
    spec = open_checkpoint(resolve_model(arguments.model)).spec
    args = EngineArgs.make(
        model=arguments.model, device=arguments.device, mode="exact", speculate=speculate, max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_BATCHED, scheduling="priority",
        kv_cache=2 * spec.num_layers * spec.kv_size * 4 * KV_TOKENS,
    )  # fmt: skip
    return Engine(args)


class Load:
    """Requests at random, the same for the same seed but for when they come."""

    def __init__(self, vocab_size: int, seed: int):
        self._random = random.Random(seed)
        self._vocab = min(vocab_size, 30000)
        self._shared = [self._tokens(40) for _ in range(4)]  # beginnings that prompts share

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(10, self._vocab) for _ in range(count)]

    def prompt(self) -> list[int]:
        draw = self._random
        length = draw.choice([1, 3, 16, 17, 40, 100, 180])
        shared = draw.choice(self._shared) if draw.random() < 0.4 else []
        words = self._tokens(length)
        return shared + (words * 2 if draw.random() < 0.3 else words)[: MAX_LEN // 2]  # repetition is what drafts like

    def params(self) -> SamplingParams:
        draw = self._random
        common: dict[str, Any] = {"max_tokens": draw.choice([1, 4, 20, 60, 120]), "ignore_eos": draw.random() < 0.5}
        if draw.random() < 0.3:
            common["draft_tokens"] = draw.choice([0, 1, 3])
        if draw.random() < 0.5:
            if draw.random() < 0.2:
                common |= {"repetition_penalty": 1.2, "min_tokens": 1}
            return SamplingParams(temperature=0, **common)
        common |= {"temperature": draw.choice([0.3, 0.8, 1.0, 1.5]), "seed": draw.randrange(2**31)}
        kind = draw.randrange(6)
        if kind == 0:
            common |= {"top_k": 20, "top_p": 0.9}
        elif kind == 1:
            common |= {"min_p": 0.05, "presence_penalty": 0.5}
        elif kind == 2:
            common |= {"logprobs": 3}
        elif kind == 3:
            common |= {"n": 2}
        elif kind == 4:
            common |= {"logit_bias": {11: 3.0, 12: -50.0}, "stop_token_ids": (11,)}
        return SamplingParams(**common)


def soak(
    engine: Engine, seconds: float, seed: int, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> tuple[Watch, list[Kept]]:
    """Keep the engine busy, and at times idle, for so long, then let it finish."""
    watch, kept = Watch(), list[Kept]()
    draw, load = random.Random(seed + 1), Load(engine.spec.vocab_size, seed)
    alive: list[tuple[RequestOutput, list[int], SamplingParams]] = []
    started = clock()
    wanted, change = MOST_OUTSTANDING, 0.0
    marks = [seconds / 3, 2 * seconds / 3]
    while alive or clock() - started < seconds:
        now = clock() - started
        if marks and now >= marks[0]:
            marks.pop(0)
            note(watch, engine)
            tell(f"{now:.0f} s: {watch.submitted} requests, {dict(watch.ends)}, {watch.memory_mib[-1]:.0f} MiB")
        if now >= change:  # bursts, lulls, and moments without any request
            wanted, change = draw.choice([0, 1, 8, 20, MOST_OUTSTANDING]), now + draw.uniform(0.5, 4.0)
        while len(alive) < wanted and now < seconds and draw.random() < 0.7:
            prompt, params = load.prompt(), load.params()
            alive.append((engine.submit(prompt, params, priority=draw.randrange(3)), prompt, params))
            watch.submitted += 1
        if alive and draw.random() < 0.02:
            engine.abort(draw.choice(alive)[0])
            watch.aborted += 1
        if engine.has_work:
            engine.step()
        elif not engine.core.idle():
            time.sleep(0.01)
        going = []
        for each in alive:
            output, prompt, params = each
            if not output.finished:
                going.append(each)
                continue
            reasons = [str(choice.finish_reason) for choice in output.outputs]
            watch.ends.update(reasons)
            watch.tokens += sum(len(choice.token_ids) for choice in output.outputs)
            if params.temperature == 0 and reasons[0] in ("length", "stop") and output.outputs[0].token_ids:
                kept.append(Kept(prompt, params, list(output.outputs[0].token_ids)))
        alive = going
        if now > 3 * seconds + 60:
            watch.faults.append(f"{len(alive)} requests did not end")
            break
    watch.seconds = clock() - started
    note(watch, engine)
    totals = engine.ledger.totals
    watch.preemptions, watch.drafts, watch.accepted = (
        totals.preemptions, totals.draft_tokens, totals.accepted_draft_tokens
    )  # fmt: skip
    return watch, kept


def note(watch: Watch, engine: Engine) -> None:
    """How much memory there is now; invariants are checked beside."""
    watch.memory_mib.append(anonymous_mib())
    watch.device_mib.append(device_mib())
    watch.graphs.append(engine.num_graphs)
    try:
        engine.core.scheduler.check()
    except AssertionError as error:
        watch.faults.append(f"the account of rows and blocks: {error}")


def judge(watch: Watch, engine: Engine, arguments: argparse.Namespace) -> None:
    """Note what is not as it should be."""
    if strange := set(watch.ends) - ENDS:
        watch.faults.append(f"requests ended with {', '.join(sorted(strange))}")
    if held := engine.core.scheduler.kv.pool.num_held:
        watch.faults.append(f"{held} blocks are held after the end")
    if not watch.preemptions:
        watch.faults.append("no request was preempted: there was no pressure; give it more time")
    graphs = arguments.graph_mib * (watch.graphs[-1] - watch.graphs[0])
    for what, marks, bound in (
        ("of the process", watch.memory_mib, arguments.growth_mib + graphs),
        ("of the GPU", watch.device_mib, arguments.device_growth_mib),
    ):
        if marks[-1] - marks[0] > bound:
            watch.faults.append(f"memory {what} grew by {marks[-1] - marks[0]:.0f} MiB, {bound:.0f} are allowed")


def run_again(engine: Engine, kept: list[Kept], watch: Watch, count: int) -> None:
    """Greedy requests alone, one after the other."""
    for each in random.Random(3).sample(kept, min(count, len(kept))):
        output = engine.submit(each.prompt, each.params)
        while engine.has_work:
            engine.step()
        watch.compared += 1
        alone = list(output.outputs[0].token_ids)
        if alone == each.tokens:
            continue
        pairs = zip(alone, each.tokens, strict=False)
        at = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
        gap = None if at is None else gap_of(engine, each.prompt + alone[:at], alone[at], each.tokens[at])
        if gap is not None and engine.config.device != "cpu" and gap <= TIE:
            watch.ties += 1
        else:
            said = "one ends before the other" if gap is None else f"token {at} differs, {gap:.2g} apart"
            watch.faults.append(f"a greedy request of {len(each.prompt)} tokens, alone: {said}")


def gap_of(engine: Engine, prompt: list[int], one: int, other: int) -> float | None:
    """Between the log-probabilities of two next tokens; None where one of them is not among the best."""
    output = engine.submit(prompt, SamplingParams(temperature=0, max_tokens=1, logprobs=5, ignore_eos=True))
    while engine.has_work:
        engine.step()
    ((found,),) = (choice.logprobs or [{}] for choice in output.outputs)
    return abs(found[one].logprob - found[other].logprob) if one in found and other in found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="none: the default model")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--minutes", type=float, default=6.0, help="of both engines together (6)")
    parser.add_argument("--speculate", default="ngram", help="of the second engine (ngram)")
    parser.add_argument("--growth-mib", type=float, default=48.0, help="of the process, beyond the first third (48)")
    parser.add_argument("--graph-mib", type=float, default=3.0, help="for each CUDA graph that is captured (3)")
    parser.add_argument("--device-growth-mib", type=float, default=256.0, help="of the GPU (256)")
    parser.add_argument("--compare", type=int, default=24, help="greedy requests of each engine run again (24)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watches: dict[str, Watch] = {}
    kept: dict[str, list[Kept]] = {}
    reports: dict[str, list[str]] = {}

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    for number, speculate in enumerate(("off", arguments.speculate)):
        engine = make_engine(arguments, speculate)
        tell(f"speculate={speculate}")
        watch, kept[speculate] = soak(engine, 30 * arguments.minutes, arguments.seed + 10 * number, tell)
        judge(watch, engine, arguments)
        reports[speculate] = engine.device_report()
        watches[speculate] = watch
        engine.close()
    engine = make_engine(arguments, "off")
    for speculate, watch in watches.items():
        run_again(engine, kept[speculate], watch, arguments.compare)
    engine.close()
    for speculate, watch in watches.items():
        drafted = f", {watch.accepted} of {watch.drafts} drafts accepted" if watch.drafts else ""
        print(
            f"{speculate:8} {watch.seconds:4.0f} s, {watch.submitted} requests ({watch.aborted} aborts), "
            f"{watch.tokens} tokens, {watch.preemptions} preemptions{drafted}; memory {watch.memory_mib[0]:.0f} -> "
            f"{watch.memory_mib[-1]:.0f} MiB, GPU {watch.device_mib[0]:.0f} -> {watch.device_mib[-1]:.0f} MiB; "
            f"{watch.compared} run again, {watch.ties} ties; {'; '.join(watch.faults) or 'all well'}"
        )
        for line in reports[speculate]:
            print(f"  {line}")
    if arguments.json:
        # no rows: nothing here is a speed
        options = {key: value for key, value in vars(arguments).items() if key != "json"}
        phases = {name: {**vars(watch), "report": reports[name]} for name, watch in watches.items()}
        packages = ("torch", "triton") if arguments.device == "cuda" else ()
        write_results(arguments.json, "soak", [], *packages, more={"options": options, "engines": phases})
    if any(watch.faults for watch in watches.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
