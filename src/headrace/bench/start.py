"""From a command to its first token, and the most memory that it takes: whole processes, in turns with peers' ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.compare import PeerChoice, describe, num_threads, peer_models
from headrace.bench.measure import median, random_prompts
from headrace.bench.peer import Peer, PeerError
from headrace.bench.results import Row
from headrace.frontend.llm import LLM

PROMPT = "Once upon a time there was a river that ran down from the mountains to the"
PROMPT_LEN, OUTPUT_LEN = 16, 32  # tokens: about those of PROMPT, which peers are given by number
_MB = 1e6


@dataclass(frozen=True)
class Start:
    """One process. first_token: seconds from when it was asked for; peak: bytes, 0 where the system does not say."""

    first_token: float
    peak: float


def as_installed(folder: Path) -> dict[str, str]:
    """Variables for processes that find their modules compiled, as those of an installation are.

    Where Python was told to keep no compiled modules (PYTHONDONTWRITEBYTECODE, often set for development), those of a
    source tree are compiled at every start, and those of the peers' environments, which are isolated from such
    variables, are not. They are then kept in `folder`, and nothing is written beside the sources.
    """
    environment = dict(os.environ)
    if sys.dont_write_bytecode:
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(folder)
    return environment


def own_start(model: Path, options: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Start:
    """`headrace run` of a model; `options` of its command line; None: this environment. PeerError: it failed."""
    command = [sys.executable, "-m", "headrace", "run", PROMPT, "-m", str(model), "--raw", "--quiet"]
    command += ["--max-tokens", str(OUTPUT_LEN), "--temperature", "0", *options]
    started = time.perf_counter()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, bufsize=0, env=environment) as process,
    ):
        assert process.stdout is not None
        peak, first = 0.0, process.stdout.read(1)
        first_token = time.perf_counter() - started
        while process.stdout.read(64):  # a token's text: the process is alive, which it must be to be asked
            peak = max(peak, _peak(process.pid))
        if process.wait() or not first:
            errors.seek(0)
            raise PeerError(f"headrace run failed: {errors.read().decode(errors='replace').strip()[-500:]}")
    return Start(first_token, peak)


def peer_start(
    choice: PeerChoice, model: Path, dtype: str, threads: int, environment: Mapping[str, str] | None = None
) -> tuple[str, Start]:
    """A peer's name, and a process of it. PeerError: it failed."""
    started = time.perf_counter()
    with Peer(choice.kind, choice.python, environment=environment) as peer:
        peer.load(model, dtype, threads)
        timing = peer.run(random_prompts(20_000, 1, PROMPT_LEN), OUTPUT_LEN)
        first_token = time.perf_counter() - started - (timing.total - timing.first_token)
        return peer.name, Start(first_token, _peak(peer.pid))


def compare_starts(
    llm: LLM,
    peers: Sequence[PeerChoice],
    *,
    options: Sequence[str] = (),
    runs: int = 3,
    dtype: str = "float32",
    tell: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Rows of an engine's model, two a peer: medians of `runs` processes of each side, after one that warms the
    system's cache of files and compiles Python's modules. Headrace reads its prompt with a tokenizer, peers are given
    numbers. `options` made the engine what it is, on a command line."""
    rows: list[Row] = []
    checkpoint, what, threads = llm.engine.checkpoint, describe(llm), num_threads(llm)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-modules-"))
        environment = as_installed(Path(folder))
        models = peer_models(checkpoint, peers, stack, tell)
        own: list[Start] = []
        others: list[list[Start]] = [[] for _ in peers]
        names = [choice.kind for choice in peers]
        for run in range(runs + 1):
            tell(f"start: {'warm-up' if not run else f'run {run} of {runs}'}")
            own.append(own_start(checkpoint.path, options, environment))
            for index, choice in enumerate(peers):
                names[index], found = peer_start(choice, models[index], dtype, threads, environment)
                others[index].append(found)
    first, peak = _medians(own[1:])
    told: list[tuple[str | None, float | None, float | None]] = [
        (name, *_medians(found[1:])) for name, found in zip(names, others, strict=True)
    ]
    for name, peer_first, peer_peak in told or [(None, None, None)]:
        rows.append(Row(f"{what} start to first token", "s", "lower", first, peer_first, name, runs=runs))
        if peak and (peer_peak or not told):
            rows.append(Row(f"{what} peak memory", "MB", "lower", peak / _MB, peer_peak and peer_peak / _MB, name,
                            runs=runs))  # fmt: skip
    return rows


def _medians(starts: Sequence[Start]) -> tuple[float, float]:
    return median([each.first_token for each in starts]), median([each.peak for each in starts])


def _peak(pid: int) -> float:
    """Most bytes that a living process had in memory; 0 where the system does not say."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    except OSError:
        return 0.0
    return int(found[1]) * 1024.0 if found else 0.0
