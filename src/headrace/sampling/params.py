"""SamplingParams: how one request's tokens are chosen and when it ends. Checked when made."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from headrace.config import option


def _number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    if value < low or value > high or (low_open and value == low):
        bracket = "(" if low_open else "["
        raise ValueError(f"{name} must be in {bracket}{low:g}, {high:g}], not {value!r}")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}, not {value}")


MAX_CHOICES = 128
MAX_STOPS = 128
MAX_STOP_LENGTH = 4096  # characters


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Defaults are those of plain sampling; `temperature=0` is greedy. Bad values raise ValueError.

    Order of the stages: min_tokens mask, temperature, top_k, top_p (over what top_k kept), min_p (relative to the
    best token), then the draw.
    """

    temperature: float = option(1.0, "0 is greedy; tiny values are honoured")
    top_k: int = option(0, "keep the k best tokens; 0 (or -1) keeps all")
    top_p: float = option(1.0, "keep the smallest set of best tokens whose probability reaches p")
    min_p: float = option(0.0, "keep tokens at least min_p times as likely as the best")
    seed: int | None = option(None, "same seed, same text, in any company; none: a seed is drawn")
    n: int = option(1, "independent choices")
    max_tokens: int | None = option(None, "most tokens to generate; none: until the model's limit")
    min_tokens: int = option(0, "no end of sequence and no stop before this many tokens")
    stop: tuple[str, ...] = option((), "the text ends before the first of these strings")
    stop_token_ids: tuple[int, ...] = option((), "these tokens end the text, as the end of sequence does")
    include_stop_str_in_output: bool = option(False, "leave the stop string, or the token that ended it, in the text")
    ignore_eos: bool = option(False, "go on after the end-of-sequence token")
    skip_special_tokens: bool = option(True, "leave special tokens out of the text; token ids always hold all")

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        _number("temperature", self.temperature, 0.0, 1e6)
        if self.top_k == -1:
            set_(self, "top_k", 0)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        _integer("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stop) > MAX_STOPS:
            raise ValueError(f"stop takes at most {MAX_STOPS} strings, not {len(stop)}")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold non-empty strings, not {text!r}")
            if len(text) > MAX_STOP_LENGTH:
                raise ValueError(f"a stop string may have {MAX_STOP_LENGTH} characters, not {len(text)}")
        set_(self, "stop", stop)
        stop_ids = tuple(self.stop_token_ids or ())
        for token in stop_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        set_(self, "stop_token_ids", stop_ids)

    def with_(self, **changes: Any) -> SamplingParams:
        """A changed copy, checked again."""
        return replace(self, **changes)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
