"""train_heads: from prompts to heads in a folder, in steps that can be interrupted and gone on with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.config import ConfigError, EngineArgs
from headrace.device.cpu import cpu_facts
from headrace.frontend.engine import choose_gpu
from headrace.frontend.llm import LLM
from headrace.frontend.progress import progress_bar
from headrace.loading.checkpoint import LoadedCheckpoint, open_checkpoint
from headrace.loading.draft_heads import MEDUSA_FILE
from headrace.loading.released import model_identity
from headrace.loading.safetensors_file import SINGLE_NAME
from headrace.loading.store import resolve_model
from headrace.models.spec import ModelSpec
from headrace.train.batches import Batches, frequent_tokens
from headrace.train.drafters import Drafter, EagleDrafter, MedusaDrafter
from headrace.train.export import export, write_json
from headrace.train.loop import Limits, Progress, train
from headrace.train.own_prompts import OwnPrompts, write_prompts
from headrace.train.prompts import Prompt, read_prompts
from headrace.train.report import engine_acceptance
from headrace.train.settings import TrainArgs
from headrace.train.start import start_from
from headrace.train.target import Target
from headrace.train.texts import Text, TextFolder, alone_in, write_texts

_DTYPES = {"float32": torch.float32, "float16": torch.float16}


def train_heads(
    engine: EngineArgs,
    settings: TrainArgs,
    sources: Sequence[str],
    out: Path,
    tell: Callable[[str], None] = print,
    show_progress: bool = False,
) -> dict[str, Any]:
    """Train heads for the engine's model on texts that it writes to the prompts in `sources`; they are in `out` as soon
    as they are better than none. Returns the facts of training.json. Raises ConfigError for what cannot be done."""
    if not sources and not settings.own_prompts:
        raise ConfigError("training needs prompts: give files of them, or --own-prompts")
    prompts = read_prompts(sources, settings.field, settings.raw) if sources else []
    work = Path(settings.work) if settings.work is not None else out / "training"
    checkpoint = open_checkpoint(resolve_model(engine.model))
    try:  # a folder that cannot be made is not to be found out about after hours
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"no heads can be written into {out}: {error.strerror}; give another --output") from None
    for kind, name in (("medusa", MEDUSA_FILE), ("eagle", SINGLE_NAME)):
        if kind != settings.kind and (out / name).exists():  # an engine would take one for the other
            raise ConfigError(f"{out} holds {name} of --kind {kind}; give another --output, or that kind")
    with alone_in(work):
        return _write_and_train(engine, settings, prompts, checkpoint, out, work, tell, show_progress)


def _write_and_train(
    engine: EngineArgs,
    settings: TrainArgs,
    prompts: Sequence[Prompt],
    checkpoint: LoadedCheckpoint,
    out: Path,
    work: Path,
    tell: Callable[[str], None],
    show_progress: bool,
) -> dict[str, Any]:
    """See train_heads; no other process works in `work`."""
    prompts, texts = _write(engine, settings, prompts, checkpoint, work, tell, show_progress)
    held = {int(index) for index in _held_out(len(prompts), settings.held_out)}
    held_texts = [text for text in texts if text.job % len(prompts) in held]
    own_texts = [text for text in texts if text.job % len(prompts) not in held]
    if not held_texts or not own_texts:
        raise ConfigError(f"{len(texts)} texts are too few to hold some out; raise --num-tokens")
    draft_ids, covered = frequent_tokens(own_texts, settings.draft_vocab, checkpoint.spec.vocab_size)
    tell(
        f"{len(own_texts)} texts to learn from, {len(held_texts)} held out; "
        f"{len(draft_ids)} tokens can be drafted, {covered:.1%} of what the model wrote"
    )
    facts: dict[str, Any] = {
        "model": checkpoint.name,
        "model_bytes": checkpoint.num_bytes,
        "identity": model_identity(checkpoint),
        "kind": settings.kind,
        "prompts": len(prompts),
        "texts": len(own_texts),
        "tokens_written": sum(len(text.tokens) - text.prompt_len for text in own_texts),
        "draft_vocab": len(draft_ids),
        "draft_vocab_covers": round(covered, 4),
    }
    _learn(engine, settings, checkpoint, own_texts, held_texts, draft_ids, out, work, facts, tell)
    if settings.report_prompts:
        asked = [prompts[index] for index in sorted(held)][: settings.report_prompts]
        facts["engine"] = engine_acceptance(replace(engine, device="cpu", dtype="auto"), settings, asked, out, tell)
    write_json(out / "training.json", facts)
    return facts


def _write(
    engine: EngineArgs,
    settings: TrainArgs,
    prompts: Sequence[Prompt],
    checkpoint: LoadedCheckpoint,
    work: Path,
    tell: Callable[[str], None],
    show_progress: bool,
) -> tuple[list[Prompt], list[Text]]:
    """All prompts, the model's own behind those given; and the texts of the work folder, as many as were asked for."""
    named = {"model": checkpoint.name, "model bytes": checkpoint.num_bytes}
    with ExitStack() as opened:
        llm: LLM | None = None
        own = OwnPrompts(work, settings.own_prompts, named)
        if own.missing:
            llm = opened.enter_context(LLM.from_args(engine))
            with progress_bar("prompts", show=show_progress) as bar:
                write_prompts(llm.engine, own, lambda done, count: bar.show(done, count, 0))
        if settings.own_prompts:
            tell(f"the model has written {len(own.prompts)} prompts")
        known = {prompt.key for prompt in prompts}
        prompts = [*prompts, *(prompt for prompt in own.prompts if prompt.key not in known)]
        if len(prompts) < 2:
            raise ConfigError("training needs two prompts at least: one is held out")
        options = {"max_tokens": settings.max_tokens, "temperature": list(settings.temperature)}
        folder = TextFolder(work, {**named, "prompts": len(prompts), **options})
        if folder.num_written < settings.num_tokens:
            llm = llm or opened.enter_context(LLM.from_args(engine))
            with progress_bar("tokens", show=show_progress) as bar:
                write_texts(
                    llm.engine,
                    prompts,
                    folder,
                    num_tokens=settings.num_tokens,
                    max_tokens=settings.max_tokens,
                    temperatures=settings.temperature,
                    minutes=settings.generate_minutes,
                    tell=lambda written: bar.show(min(written, settings.num_tokens), settings.num_tokens, 0),
                )
    tell(f"the model has written {folder.num_written} tokens in {len(folder.texts)} texts ({work})")
    return prompts, folder.texts


def _held_out(num_prompts: int, share: float) -> np.ndarray:
    """Indices of the prompts that are left out of training: the same for the same number of prompts."""
    count = max(1, round(num_prompts * share))
    return np.random.default_rng(0).permutation(num_prompts)[:count]


def _learn(
    engine: EngineArgs,
    settings: TrainArgs,
    checkpoint: LoadedCheckpoint,
    own_texts: Sequence[Text],
    held_texts: Sequence[Text],
    draft_ids: np.ndarray,
    out: Path,
    work: Path,
    facts: dict[str, Any],
    tell: Callable[[str], None],
) -> None:
    """Train on the texts and leave the best heads in `out`."""
    on_gpu = choose_gpu(engine.device) is not None
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = _DTYPES.get(engine.dtype, torch.bfloat16) if on_gpu else torch.float32
    threads = engine.num_threads or cpu_facts().num_threads
    if not on_gpu:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    longest = max(len(text.tokens) for text in [*own_texts, *held_texts])
    target = Target(checkpoint, device, dtype, longest, threads, "default" if engine.mode == "auto" else engine.mode)
    drafter = _drafter(settings, checkpoint.spec, target.output_rows(torch.from_numpy(draft_ids))).to(device)
    size = settings.batch_tokens or (16384 if on_gpu else 2048)
    room = settings.cache_gib * 2**30
    if settings.start_from is not None and isinstance(drafter, EagleDrafter):
        taken = start_from(drafter, Path(settings.start_from), draft_ids)
        tell(f"training begins with {settings.start_from}, {taken} of its output's rows")
    training = Batches(target, own_texts, draft_ids, size, room, late_start=settings.late_start)
    held_out = Batches(target, held_texts, draft_ids, size, room)
    tell(f"{sum(each.numel() for each in drafter.parameters()) / 1e6:.2f} M numbers to learn, on {device.type}")

    def note(progress: Progress) -> None:
        facts.update(
            best=progress.best,
            steps=progress.steps,
            seconds=round(progress.seconds, 1),
            history=progress.history,
        )

    def keep_best(progress: Progress) -> None:
        note(progress)
        export(drafter, out, checkpoint.spec, draft_ids, facts, int8=settings.weights == "int8")

    limits = Limits(settings.epochs, None if settings.minutes is None else 60 * settings.minutes)
    state = work / f"{settings.kind}.state"
    progress = train(drafter, training, held_out, limits, settings.learning_rate, state, keep_best, tell)
    note(progress)
    tell(f"trained {progress.steps} steps in {progress.seconds:.0f} s; the best heads are in {out}")


def _drafter(settings: TrainArgs, spec: ModelSpec, output: torch.Tensor) -> Drafter:
    if settings.kind == "medusa":
        return MedusaDrafter(spec, settings.unroll, output)
    return EagleDrafter(spec, settings.unroll, output, settings.inner_size or spec.intermediate_size)
