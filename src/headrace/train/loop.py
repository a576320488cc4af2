"""The training loop: soft targets along every chain, AdamW, the best heads by what held-out text would accept."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.config import ConfigError
from headrace.train.batches import Batch, Batches
from headrace.train.drafters import Drafter

_DECAY = 0.8  # of a step's weight to the one before: it counts only if that one was right
_WARM_UP, _LEAST_RATE = 0.03, 0.02
_MEASUREMENTS = 12  # of the held-out texts, over the time of training


@dataclass(frozen=True)
class Measured:
    """What held-out texts say of heads, by place in a draft."""

    greedy: list[float]  # how often the best guess is the model's best token, after right ones
    shared: list[float]  # sum of min(p, q): how often residual verification accepts at temperature 1
    loss: float

    @property
    def expected(self) -> float:
        """Drafts of a whole chain that greedy verification accepts, if places were independent."""
        return sum(math.prod(self.greedy[: count + 1]) for count in range(len(self.greedy)))

    def line(self) -> str:
        places = " ".join(f"{share:.3f}" for share in self.greedy)
        return f"loss {self.loss:.3f}, accepted by place {places}, {self.expected:.2f} of {len(self.greedy)} drafts"


@dataclass
class Progress:
    """How far training is; kept with the heads, so that it goes on from there."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    epochs: float = 0.0
    best: dict[str, Any] = field(default_factory=dict)  # measurement of the best heads so far
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Limits:
    """When training ends, whichever comes first."""

    epochs: float
    seconds: float | None


def train(
    drafter: Drafter,
    training: Batches,
    held_out: Batches,
    limits: Limits,
    learning_rate: float,
    state: Path,
    keep_best: Callable[[Progress], None],
    tell: Callable[[str], None],
) -> Progress:
    """Train until a limit; `state` is the file to go on from. `keep_best` is called while `drafter` holds the best
    heads so far. Raises ConfigError if `state` is of other heads."""
    device = next(drafter.parameters()).device
    matrices = [each for each in drafter.parameters() if each.dim() > 1]
    others = [each for each in drafter.parameters() if each.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=(0.9, 0.95),
    )
    progress = _restore(state, drafter, optimizer, device)
    before, started = progress.seconds, time.monotonic()

    def share() -> float:
        """How much of the training is done, 0 to 1."""
        progress.seconds = before + time.monotonic() - started
        by_time = 0.0 if limits.seconds is None else progress.seconds / limits.seconds
        return min(1.0, max(by_time, progress.epochs / limits.epochs))

    def measure() -> None:
        found = evaluate(drafter, held_out)
        facts = {"steps": progress.steps, "tokens": progress.tokens, **_facts(found)}
        progress.history.append(facts)
        tell(f"step {progress.steps}, {progress.tokens / 1e6:.2f} M tokens, {progress.seconds:.0f} s: {found.line()}")
        if not progress.best or facts["expected"] > progress.best["expected"]:
            progress.best = facts
            keep_best(progress)
        _save(state, drafter, optimizer, progress)

    if progress.steps == 0:
        tell(f"at the start: {evaluate(drafter, held_out).line()}")
    measured = math.floor(share() * _MEASUREMENTS)
    try:
        while share() < 1.0:
            count = len(training.cut())
            for batch in training.one_pass():
                rate = learning_rate * _schedule(share())
                for group in optimizer.param_groups:
                    group["lr"] = rate
                loss = _loss(drafter, batch)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
                optimizer.step()
                progress.steps += 1
                progress.tokens += len(batch.wanted)
                progress.epochs += 1 / count
                now = share()
                if math.floor(now * _MEASUREMENTS) > measured and now < 1.0:
                    measured = math.floor(now * _MEASUREMENTS)
                    measure()
                if now >= 1.0:
                    break
        measure()
    except KeyboardInterrupt:
        _save(state, drafter, optimizer, progress)
        raise
    return progress


def evaluate(drafter: Drafter, batches: Batches) -> Measured:
    """Heads on texts, no chain of which they have learnt from."""
    steps = drafter.num_steps
    device = next(drafter.parameters()).device
    sums = torch.zeros(4, steps, dtype=torch.float64, device=device)
    with torch.no_grad():
        for batch in batches.one_pass(shuffled=False):
            for step, (log_q, lines) in enumerate(_guesses(drafter, batch)):
                p = batch.wanted[lines].float()
                right = (log_q.argmax(-1) == batch.best[lines]).sum()
                shared = torch.minimum(p, log_q.exp()).sum()
                count = torch.tensor(len(lines), device=device)
                sums[:, step] += torch.stack([right, shared, -(p * log_q).sum(), count])
    right, shared, loss, counts = sums.cpu()
    counts = counts.clamp(min=1)
    return Measured((right / counts).tolist(), (shared / counts).tolist(), float((loss / counts).mean()))


def _guesses(drafter: Drafter, batch: Batch) -> list[tuple[Tensor, Tensor]] | Any:
    """Of every step, (log probabilities float32 [N, D], lines of `batch.wanted` int64 [N]) of the chains that guess a
    token which the model wrote."""
    chains = batch.features.shape[1] - 1
    place = torch.nn.functional.pad(batch.place, (0, drafter.num_steps), value=-1)
    on_gpu = batch.features.is_cuda
    with torch.autocast(batch.features.device.type, torch.bfloat16, enabled=on_gpu):
        for step, hidden in enumerate(drafter.steps(batch.embedded, batch.features)):
            lines = place[:, step + 1 : step + 1 + chains]
            asked = lines >= 0
            logits = drafter.score(step, hidden[asked])
            yield torch.log_softmax(logits.float(), -1), lines[asked]


def _loss(drafter: Drafter, batch: Batch) -> Tensor:
    """Cross-entropy against the model's probabilities; what the drafts cannot say has no part in it."""
    total: Tensor = batch.features.new_zeros((), dtype=torch.float32)
    weights = 0.0
    for step, (log_q, lines) in enumerate(_guesses(drafter, batch)):
        weight = _DECAY**step
        total = total - weight * (batch.wanted[lines] * log_q).sum() / max(1, len(lines))
        weights += weight
    return total / weights


def _schedule(share: float) -> float:
    """Of the highest learning rate: up in a line, down in a half cosine."""
    if share < _WARM_UP:
        return max(0.01, share / _WARM_UP)
    down = (share - _WARM_UP) / (1 - _WARM_UP)
    return _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * down))


def _facts(found: Measured) -> dict[str, Any]:
    return {
        "loss": round(found.loss, 4),
        "greedy": [round(each, 4) for each in found.greedy],
        "shared": [round(each, 4) for each in found.shared],
        "expected": round(found.expected, 4),
    }


def _save(path: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    temporary = path.with_suffix(".unfinished")
    state = {"heads": drafter.state_dict(), "optimizer": optimizer.state_dict(), "progress": vars(progress)}
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch's own words for a full disk are pages
        temporary.unlink(missing_ok=True)
        why = getattr(error, "strerror", None) or str(error.__context__ or error).split("\n")[0]
        raise OSError(f"{path} cannot be written ({why}); make room, and the same command goes on") from None


def _restore(path: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, device: torch.device) -> Progress:
    if not path.is_file():
        return Progress()
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"{path} is damaged ({reason}); delete it, and training begins anew") from None
    shapes = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    if {name: tuple(tensor.shape) for name, tensor in state["heads"].items()} != shapes:
        raise ConfigError(f"{path} is of heads of other sizes; give another --work folder, or delete it")
    drafter.load_state_dict(state["heads"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])
