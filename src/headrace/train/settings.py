"""What a user can say about the training of heads; the command line is generated from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.config import ConfigError, option

DEFAULT_TEMPERATURES = (0.0, 0.7, 1.0)
_POSITIVE = (
    "num_tokens", "max_tokens", "generate_minutes", "minutes", "epochs", "draft_vocab", "batch_tokens", "unroll",
    "learning_rate", "inner_size", "cache_gib",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainArgs:
    """Options of `headrace train-heads`, beside the engine's."""

    kind: Literal["eagle", "medusa"] = option("eagle", "an EAGLE head, or Medusa heads")
    field: str = option("prompt", "field of a line of JSON that holds its prompt: a text, or a list of messages")
    raw: bool = option(False, "prompts are the beginnings of texts, not what a user says to a chat model")
    own_prompts: int = option(
        0, "times that the model is let write a prompt itself, as its chat template's user, beside those given"
    )
    work: str | None = option(None, "folder of texts and state, to go on from; none: training/ in the output folder")
    num_tokens: int = option(2_000_000, "tokens to let the model write")
    max_tokens: int = option(256, "most tokens of one text")
    temperature: tuple[float, ...] = option(
        DEFAULT_TEMPERATURES, "of the texts, can be given several times (0, 0.7 and 1.0)"
    )
    generate_minutes: float | None = option(None, "write texts for so long at most")
    minutes: float | None = option(None, "train for so long at most")
    epochs: float = option(8.0, "passes over the texts, if time allows")
    draft_vocab: int = option(6144, "tokens that can be drafted, the most frequent ones in the texts")
    unroll: int = option(5, "drafts in a row that are trained; of Medusa, heads")
    inner_size: int | None = option(None, "width of an EAGLE head's feed-forward block; none: the model's")
    start_from: str | None = option(None, "folder of an EAGLE head whose weights training begins with")
    late_start: float = option(
        0.0, "part of the texts whose prompts heads see only the end of, as after hits of the prefix cache"
    )
    weights: Literal["bfloat16", "int8"] = option(
        "bfloat16", "how weights are written; int8: of an EAGLE head, half as large"
    )
    batch_tokens: int | None = option(None, "tokens in a training step (16384 on a GPU, 2048 on a CPU)")
    learning_rate: float = option(1e-3, "at its highest")
    cache_gib: float = option(4.0, "memory for features of the model that are kept between passes")
    held_out: float = option(0.03, "part of the prompts whose texts are left out of training and measured")
    report_prompts: int = option(24, "held-out prompts that the engine answers with the heads at the end; 0: none")

    def __post_init__(self) -> None:
        if isinstance(self.temperature, list):
            object.__setattr__(self, "temperature", tuple(self.temperature))
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, not {value!r}")
        if not 0 < self.held_out <= 0.5:
            raise ConfigError(f"held_out must be above 0 and at most 0.5, not {self.held_out!r}")
        if not self.temperature or not all(0 <= each <= 10 for each in self.temperature):
            raise ConfigError(f"temperature must be from 0 to 10, not {self.temperature!r}")
        if not 0 <= self.late_start <= 1:
            raise ConfigError(f"late_start must be from 0 to 1, not {self.late_start!r}")
        if self.own_prompts < 0:
            raise ConfigError(f"own_prompts must be at least 0, not {self.own_prompts!r}")
        if self.start_from is not None and self.kind != "eagle":
            raise ConfigError(f"start_from is for EAGLE heads; leave it out for kind {self.kind}")
        if self.report_prompts < 0:
            raise ConfigError(f"report_prompts must be at least 0, not {self.report_prompts!r}")
        if self.weights == "int8" and self.kind != "eagle":
            raise ConfigError(f"weights int8 is for EAGLE heads; leave it out for kind {self.kind}")
        if self.unroll > 16:
            raise ConfigError(f"unroll must be at most 16, not {self.unroll!r}")
