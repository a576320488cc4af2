"""One side of the GPU table: this one file, run by the Python of the engine that is measured.

    PYTHON gpu_side.py headrace|vllm < {"model": ..., "options": {...}, "cases": [...]}

Standard output takes one line of JSON a case, `{"case": NAME, "value": ..., "values": [...]}`, the first of them
`{"case": "start", ...}` once a first token is there. Both sides run the very same code but for the class that wraps the
engine, so prompts, lengths, seeds and the order of runs are the same. Only the wrapper imports an engine.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

WARM = 3  # runs that do not count, where they take no time
SHORT = 16  # tokens of the shorter of two generations whose difference is a step's time
LEAST_TOKEN, MOST_TOKEN = 10, 30000  # of prompts: all vocabularies of the table hold them


class Engine(Protocol):
    """What is measured."""

    name: str

    def generate(self, prompts: Sequence[list[int]], lengths: Sequence[int], temperature: float) -> None:
        """Exactly so many tokens for each prompt, greedy or drawn with a seed."""

    def share(self, prefill: bool) -> float | None:
        """Share of the device's limit that steps of one kind reached since the last call; None: not known."""

    def settle(self) -> None:
        """A moment without requests, as there are between those of a server."""


class Headrace:
    """This engine, through its public class."""

    def __init__(self, model: str, options: dict[str, Any]):
        from headrace import __version__
        from headrace.frontend.llm import LLM
        from headrace.sampling.params import SamplingParams

        self._params = SamplingParams
        self._llm = LLM(model, device="cuda", prefix_caching=False, **options)
        self._seen = self._llm.engine.ledger.totals.steps
        self.name = f"headrace {__version__}"

    def generate(self, prompts: Sequence[list[int]], lengths: Sequence[int], temperature: float) -> None:
        params = [self._params(temperature=temperature, seed=1, max_tokens=n, ignore_eos=True) for n in lengths]
        self._llm.generate(list(prompts), params)

    def share(self, prefill: bool) -> float | None:
        from headrace.bench.compare import limit_share

        ledger = self._llm.engine.ledger
        records = ledger.records(ledger.totals.steps - self._seen)
        self._seen = ledger.totals.steps
        # the median: the first steps of a kind compile kernels and capture graphs
        wanted = [limit_share([each]) for each in records if (each.num_prefill_tokens > 0) == prefill]
        shares = [share for share in wanted if share is not None]
        return statistics.median(shares) if shares else None

    def settle(self) -> None:
        while self._llm.engine.core.idle():
            pass


class VLLM:
    """vLLM with the settings that a user who measures would choose."""

    def __init__(self, model: str, options: dict[str, Any]):
        from vllm import LLM, SamplingParams, __version__  # type: ignore[import-not-found]

        self._params = SamplingParams
        dummy = model.startswith("dummy:")
        names = {"max_model_len": "max_model_len", "max_num_seqs": "max_num_seqs"}
        self._llm = LLM(
            model=model.removeprefix("dummy:"),
            load_format="dummy" if dummy else "auto",
            skip_tokenizer_init=True,
            gpu_memory_utilization=0.85,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **{theirs: options[ours] for ours, theirs in names.items() if ours in options},
        )
        self.name = f"vllm {__version__}"

    def generate(self, prompts: Sequence[list[int]], lengths: Sequence[int], temperature: float) -> None:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [
            self._params(temperature=temperature, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths
        ]
        self._llm.generate(given, params, use_tqdm=False)

    def share(self, prefill: bool) -> float | None:
        return None

    def settle(self) -> None:
        """vLLM captures its graphs before its first request."""


class Runs:
    """Measures cases on one engine."""

    def __init__(self, engine: Engine, runs: int):
        self._engine, self._runs, self._draw = engine, runs, random.Random(0)

    def prompt(self, length: int) -> list[int]:
        return [self._draw.randrange(LEAST_TOKEN, MOST_TOKEN) for _ in range(length)]

    def seconds(self, prompts: Sequence[list[int]], lengths: Sequence[int], temperature: float = 0.0) -> float:
        self._engine.settle()
        started = time.perf_counter()
        self._engine.generate(prompts, lengths, temperature)
        return time.perf_counter() - started

    def measure(self, case: dict[str, Any]) -> list[float]:
        """The values of all counted runs; what comes first warms up."""
        kind, runs = case["kind"], case.get("runs") or self._runs
        if kind == "decode":
            context = case.get("context")
            lengths = [128 if context is None else context - 200] * case["batch"]
            return self._step_ms(lengths, 128 if context is None else 64, runs)
        if kind == "skewed":
            return self._step_ms([case["context"]] + [1000] * (case["batch"] - 1), 64, runs)
        if kind == "ttft":
            for _ in range(WARM):
                self.seconds([self.prompt(case["tokens"])], [1])
            return [self.seconds([self.prompt(case["tokens"])], [1]) * 1e3 for _ in range(max(3, self._runs))]
        if kind == "offline":
            draw = random.Random(0)
            sizes = [(draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(case["requests"])]
            prompts = [self.prompt(tokens) for tokens, _ in sizes]
            self.seconds(prompts, [1 + tokens // 8 for _, tokens in sizes], temperature=0.6)  # every size of a step
            seconds = self.seconds(prompts, [tokens for _, tokens in sizes], temperature=0.6)
            return [sum(tokens for _, tokens in sizes) / seconds]
        raise ValueError(f"no such kind of case: {kind}")

    def _step_ms(self, contexts: Sequence[int], steps: int, runs: int) -> list[float]:
        """Milliseconds of a decode step: long less short generations, so that prefill and start of a run cancel."""
        prompts = [self.prompt(context) for context in contexts]
        for _ in range(WARM if max(contexts) < 1000 else 1):
            self.seconds(prompts, [SHORT] * len(prompts))
        taken = []
        for _ in range(runs):
            short = self.seconds(prompts, [SHORT] * len(prompts))
            taken.append((self.seconds(prompts, [SHORT + steps] * len(prompts)) - short) / steps * 1e3)
        return taken


def main() -> None:
    work = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr  # engines print where results go

    def say(**row: Any) -> None:
        print(json.dumps(row), file=out, flush=True)

    kinds: dict[str, type[Headrace] | type[VLLM]] = {"headrace": Headrace, "vllm": VLLM}
    engine: Engine = kinds[sys.argv[1]](work["model"], work["options"])
    runs = Runs(engine, work["runs"])
    runs.seconds([runs.prompt(16)], [1])
    say(case="start", name=engine.name)
    runs.seconds([runs.prompt(128)] * 4, [SHORT] * 4)
    for case in work["cases"]:
        engine.share(False)
        values = runs.measure(case)
        share = engine.share(case["kind"] == "ttft") if case["kind"] != "offline" else None
        say(case=case["name"], value=statistics.median(values), values=values, limit_share=share)


if __name__ == "__main__":
    main()
