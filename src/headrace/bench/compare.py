"""The same work through Headrace and through peers, in turns in one run: ratios, and shares of the machine's limits."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from headrace.bench.hf_export import write_hf_folder
from headrace.bench.measure import Timing, median, random_prompts, run_batch
from headrace.bench.peer import Peer
from headrace.bench.results import Row
from headrace.frontend.llm import LLM
from headrace.ledger.record import StepRecord
from headrace.loading.checkpoint import GGUFCheckpoint, LoadedCheckpoint

Kind = Literal["decode", "ttft", "offline"]
_FORMATS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_WARM_UP_TOKENS = 4
_BUSY = 0.5  # load average above which a comparison is not fair


@dataclass(frozen=True)
class Work:
    """One case: `count` prompts of `prompt_len` random tokens, `output_len` greedy tokens each.

    decode measures tokens per second once every request has its first one, ttft milliseconds to the first one,
    offline tokens per second over all.
    """

    kind: Kind
    count: int
    prompt_len: int
    output_len: int

    @property
    def name(self) -> str:
        """As in the results files."""
        if self.kind == "decode":
            return f"decode batch {self.count}"
        if self.kind == "ttft":
            return f"ttft {self.prompt_len}"
        return f"offline {self.count} x {self.prompt_len}+{self.output_len}"

    def value(self, timing: Timing) -> float:
        """What of a run is reported, in the unit of `row`."""
        if self.kind == "decode":
            return timing.decode_rate
        return timing.first_token * 1e3 if self.kind == "ttft" else timing.output_rate

    def row(self, what: str, ours: float, share: float | None, runs: int, peer: tuple[str, float] | None) -> Row:
        return Row(
            case=f"{what} {self.name}",
            unit="ms" if self.kind == "ttft" else "tok/s",
            better="lower" if self.kind == "ttft" else "higher",
            headrace=ours,
            peer=None if peer is None else peer[1],
            peer_name=None if peer is None else peer[0],
            limit_share=share,
            runs=runs,
        )


@dataclass(frozen=True)
class PeerChoice:
    """Which peer, run by which Python."""

    kind: str
    python: str
    model: str = ""  # what the peer loads; "": the same as Headrace, in a form that it reads


def compare(
    llm: LLM,
    works: Sequence[Work],
    peers: Sequence[PeerChoice],
    *,
    runs: int = 3,
    dtype: str = "float32",
    tell: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Measure every work `runs` times on every side, after one short run each, and take medians. The sides take turns
    within every run, and the first of them changes from run to run; prompts are new in every run and the same on all
    sides. One row a work and peer. `tell` is told what is being done. PeerError when a peer fails."""
    rows: list[Row] = []
    tell_if_busy(tell)
    threads = num_threads(llm)
    with ExitStack() as stack:
        models = peer_models(llm.engine.checkpoint, peers, stack, tell)
        started = _start(models, peers, dtype, threads, stack, tell)
        for work in works:
            shares: list[float] = []
            sides: list[Callable[[Sequence[list[int]], int], Timing]] = [
                partial(_headrace, llm, work, shares),
                *(peer.run for peer in started),
            ]
            values = _measure(llm.engine.spec.vocab_size, work, sides, runs, tell)
            shares = shares[1:]  # the first is the warm-up's
            share = median(shares) if shares else None
            what = describe(llm)
            if not started:
                rows.append(work.row(what, values[0], share, runs, None))
            for peer, value in zip(started, values[1:], strict=True):
                rows.append(work.row(what, values[0], share, runs, (peer.name, value)))
    return rows


def tell_if_busy(tell: Callable[[str], None]) -> None:
    """Say so where a comparison that begins now would not be fair."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > _BUSY:
        tell(f"other programs keep {load:.1f} processors busy; that slows the sides unequally, so trust no ratio")


def num_threads(llm: LLM) -> int:
    """Of the engine, which peers are given as many of."""
    return llm.engine.ledger.facts.num_threads if llm.engine.ledger.enabled else 1


def peer_models(
    checkpoint: LoadedCheckpoint, peers: Sequence[PeerChoice], stack: ExitStack, tell: Callable[[str], None]
) -> list[Path]:
    """What each peer loads; a folder that is written for some of them is gone when `stack` is closed. ValueError where
    there is nothing that a peer could read."""
    models = []
    folder: Path | None = None
    for choice in peers:
        model, is_gguf = checkpoint.path, isinstance(checkpoint, GGUFCheckpoint)
        if choice.model:
            model = Path(choice.model)
            if not model.exists():
                raise ValueError(f"there is no {model} for {choice.kind} to load")
        elif choice.kind in ("llama.cpp", "openvino") and not is_gguf:
            raise ValueError(f"{choice.kind} reads GGUF files; give one as the model, or its own form: --peer-model")
        elif choice.kind == "transformers" and is_gguf:
            if folder is None:
                tell("writing dequantised weights for the peers")
                temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-peer-"))
                folder = write_hf_folder(checkpoint, Path(temporary))
            model = folder
        models.append(model)
    return models


def _start(
    models: Sequence[Path],
    peers: Sequence[PeerChoice],
    dtype: str,
    threads: int,
    stack: ExitStack,
    tell: Callable[[str], None],
) -> list[Peer]:
    """The peers' processes, with the model loaded."""
    started = []
    for choice, model in zip(peers, models, strict=True):
        peer = stack.enter_context(Peer(choice.kind, choice.python))
        tell(f"{choice.kind} loads the model")
        peer.load(model, dtype, threads)
        started.append(peer)
    return started


def _measure(
    vocab_size: int,
    work: Work,
    sides: Sequence[Callable[[Sequence[list[int]], int], Timing]],
    runs: int,
    tell: Callable[[str], None],
) -> list[float]:
    """Medians of `runs` runs, a side each."""
    values: list[list[float]] = [[] for _ in sides]
    for run in range(-1, runs):
        tell(f"{work.name}: {'warm-up' if run < 0 else f'run {run + 1} of {runs}'}")
        prompts = random_prompts(vocab_size, work.count, work.prompt_len, seed=run + 1)
        for turn in range(len(sides)):
            side = (turn + run + 1) % len(sides)
            if run < 0:
                sides[side](prompts, min(_WARM_UP_TOKENS, work.output_len))
            else:
                values[side].append(work.value(sides[side](prompts, work.output_len)))
    return [median(each) for each in values]


def _headrace(llm: LLM, work: Work, shares: list[float], prompts: Sequence[list[int]], num_tokens: int) -> Timing:
    """A run of ours, which adds its share of the limit to `shares`."""
    ledger = llm.engine.ledger
    before = ledger.totals.steps
    timing = run_batch(llm, prompts, num_tokens)
    records = ledger.records(ledger.totals.steps - before)
    if work.kind != "offline":
        records = [record for record in records if (record.num_prefill_tokens > 0) == (work.kind == "ttft")]
    share = limit_share(records)
    if share is not None:
        shares.append(share)
    return timing


def limit_share(records: Sequence[StepRecord]) -> float | None:
    """The least time that the steps' bytes or operations must take on this machine, over the time they took."""
    total = sum(record.total for record in records)
    if not total > 0:
        return None
    return sum(max(r.judgement.bandwidth_seconds, r.judgement.compute_seconds) for r in records) / total


def describe(llm: LLM) -> str:
    """MODEL FORMAT MODE, as the results files' case names begin."""
    checkpoint = llm.engine.checkpoint
    words = [checkpoint.name.lower(), weight_format(checkpoint), llm.engine.config.mode]
    return " ".join(word for word in words if word)


def weight_format(checkpoint: LoadedCheckpoint) -> str:
    """The type that most of the weights' bytes have: "q4_1", "bf16"; "" if it cannot be told."""
    if isinstance(checkpoint, GGUFCheckpoint):
        bytes_of: dict[str, int] = {}
        for name in checkpoint.file.tensors:
            kind = checkpoint.file.info(name).type.name.lower()
            bytes_of[kind] = bytes_of.get(kind, 0) + checkpoint.file.raw(name).nbytes
        return max(bytes_of, key=lambda kind: bytes_of[kind], default="")
    try:
        config = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
        return _FORMATS.get(str(config.get("dtype", config.get("torch_dtype"))), "")
    except (OSError, ValueError, AttributeError):
        return ""
