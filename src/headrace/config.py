"""What a user can say (`EngineArgs`) and what the engine runs with (`EngineConfig`). Both are frozen.

The command line and the keywords of `LLM` are generated from `EngineArgs`: one field, one help text.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class ConfigError(ValueError):
    """An option that cannot be; the message says what would do."""


def option(default: Any, text: str, **extra: Any) -> Any:
    """A dataclass field with its help text."""
    return field(default=default, metadata={"help": text, **extra})


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Options of an engine; None lets the engine choose (and say why)."""

    model: str | None = option(None, "model name, GGUF file, folder or hub id; none: smollm2-135m")
    mode: Literal["auto", "default", "exact"] = option(
        "auto",
        "arithmetic of quantised weights: exact (fp32), default (inputs as 16-bit integers where there are kernels) "
        "or auto (default)",
    )
    max_model_len: int | None = option(None, "longest prompt and output together, in tokens")
    max_num_seqs: int | None = option(None, "most requests running at once")
    max_num_batched_tokens: int | None = option(None, "most tokens in one step; longer prompts are cut into chunks")
    kv_cache: str | int | None = option(None, "size of the KV cache: bytes, 512MiB, 2GB, or 30% of free memory")
    block_size: int | None = option(None, "tokens in a block of KV cache")
    prefix_caching: bool = option(True, "find prompts, or their beginnings, that are computed already")
    scheduling: Literal["fcfs", "priority"] = option("fcfs", "order in which waiting requests are admitted")
    num_threads: int | None = option(None, "processor threads of the native kernels; none: all this process may use")
    attention_backend: str | None = option(None, "attention kernels to use instead of the selector's choice")
    speculate: Literal["off", "ngram"] = option("off", "draft tokens and verify them together: ngram looks the text up")
    num_draft_tokens: int | None = option(None, "verify always so many drafts; none: as many as the cost model advises")
    steps_in_flight: int | None = option(None, "steps started before the first one's result is read (1 to 3)")
    ledger: bool = option(True, "record each step: what it did, what bound it, what was refused")

    @classmethod
    def make(cls, **options: Any) -> EngineArgs:
        """From keywords; an unknown one raises TypeError and names the nearest known one."""
        known = [each.name for each in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; options are {', '.join(known)}"
                raise TypeError(f"unknown option {name!r}{hint}")
        return cls(**options)

    def __post_init__(self) -> None:
        least = {"max_model_len": 2, "max_num_seqs": 1, "max_num_batched_tokens": 1, "block_size": 1, "num_threads": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise ConfigError(f"{name} must be an integer of at least {low}, not {value!r}")
        if self.steps_in_flight is not None and self.steps_in_flight not in (1, 2, 3):
            raise ConfigError(f"steps_in_flight must be 1, 2 or 3, not {self.steps_in_flight!r}")
        if self.num_draft_tokens is not None and not 1 <= self.num_draft_tokens <= 64:
            raise ConfigError(f"num_draft_tokens must be between 1 and 64, not {self.num_draft_tokens!r}")
        if self.num_draft_tokens is not None and self.speculate == "off":
            raise ConfigError("num_draft_tokens needs a way to draft; give speculate=ngram too")
        for name, allowed in (
            ("mode", ("auto", "default", "exact")),
            ("scheduling", ("fcfs", "priority")),
            ("speculate", ("off", "ngram")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")


@dataclass(frozen=True)
class EngineConfig:
    """Resolved numbers; made by `resolve` and never changed."""

    mode: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int  # upper bound; memory is touched as it is used
    block_size: int
    num_blocks: int
    prefix_caching: bool
    scheduling: str
    speculate: str
    max_draft_tokens: int
    fixed_depth: bool  # verify all drafts; else as many as the cost model finds to pay
    steps_in_flight: int
    ledger: bool
    num_threads: int


def parse_bytes(text: str | int, whole: int, name: str) -> int:
    """Bytes of '512MiB', '2GB', '1073741824' or '30%' (of `whole`); ConfigError names the option."""
    if isinstance(text, int) and not isinstance(text, bool):
        value = float(text)
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[kmg]?i?b?)\s*", str(text).lower())
        if match is None:
            raise ConfigError(f"{name} takes bytes such as 512MiB, 2GB or 30%, not {text!r}")
        number, unit = float(match[1]), match[2]
        value = number / 100 * whole if unit == "%" else number * _UNITS[unit.removesuffix("b")]
    if value < 1:
        raise ConfigError(f"{name} must be above zero, not {text!r}")
    return int(value)
