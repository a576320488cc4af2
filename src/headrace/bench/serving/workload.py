"""What clients ask: conversations of one or more turns, with lengths drawn from a seed, and when they come.

Prompts are random words, so that no request finds another's beginning in a prefix cache unless it is meant to. Lengths
are aimed at in tokens of the server's own tokenizer (`TokensPerWord`, measured at the start); what came of it is in the
server's own usage, which the results count.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["random", "sharegpt", "shared-prefix", "multi-turn"]
Arrivals = Literal["closed", "poisson", "bursty"]
KINDS: tuple[Kind, ...] = ("random", "sharegpt", "shared-prefix", "multi-turn")
ARRIVALS: tuple[Arrivals, ...] = ("closed", "poisson", "bursty")

_TEXT = """
    river water stone wheel mill field rain wind cloud light glass paper house garden street market window table letter
    number music color winter summer morning evening story question answer reason moment people family friend teacher
    doctor worker farmer machine engine bridge road train ship island mountain valley forest flower bread sugar salt
    metal silver copper iron gold heart hand voice dream plan rule change order power force speed weight
"""
WORDS = tuple(_TEXT.split())

# Log-normal lengths in tokens, in the shape of conversations that people shared: many short prompts and a long tail,
# answers a little longer. (median, sigma, least, most)
_CONVERSATION = {"prompt": (70.0, 1.5, 4, 1024), "output": (110.0, 1.1, 4, 800)}


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, and how many tokens the answer may have."""

    text: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other; each has all that was said before."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class TokensPerWord:
    """How a server counts: tokens = words * slope + fixed."""

    slope: float
    fixed: float

    def words(self, tokens: int) -> int:
        """Words that make a prompt of about so many tokens; at least 1."""
        return max(1, round((tokens - self.fixed) / self.slope))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Which conversations. Lengths are tokens; `spread` draws them from (1 - spread) to (1 + spread) of it."""

    kind: Kind = "random"
    count: int = 64
    prompt_len: int = 128
    output_len: int = 64
    spread: float = 0.5
    prefix_len: int = 512  # shared-prefix: tokens that prompts of a group begin with
    num_prefixes: int = 4
    num_turns: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"workload must be one of {', '.join(KINDS)}, not {self.kind!r}")
        for name in ("count", "prompt_len", "output_len", "prefix_len", "num_prefixes", "num_turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0.0 <= self.spread <= 1.0:
            raise ValueError(f"spread must be between 0 and 1, not {self.spread}")

    @property
    def label(self) -> str:
        """For the names of results."""
        lengths = f"{self.prompt_len}+{self.output_len}"
        return {
            "random": f"random {lengths}",
            "sharegpt": "sharegpt-like",
            "shared-prefix": f"shared-prefix {self.prefix_len}+{lengths}",
            "multi-turn": f"multi-turn {self.num_turns} x {lengths}",
        }[self.kind]

    def conversations(self, scale: TokensPerWord) -> list[Conversation]:
        """The same for the same seed and scale."""
        draw = random.Random(self.seed)
        prefixes = [_text(draw, scale.words(self.prefix_len)) for _ in range(self.num_prefixes)]
        return [self._conversation(draw, scale, prefixes) for _ in range(self.count)]

    def _conversation(self, draw: random.Random, scale: TokensPerWord, prefixes: list[str]) -> Conversation:
        turns = []
        for _ in range(self.num_turns if self.kind == "multi-turn" else 1):
            prompt, output = self._lengths(draw)
            text = _text(draw, scale.words(prompt))
            if self.kind == "shared-prefix":
                text = f"{draw.choice(prefixes)} {text}"
            turns.append(Turn(text, output))
        return Conversation(tuple(turns))

    def _lengths(self, draw: random.Random) -> tuple[int, int]:
        if self.kind == "sharegpt":
            return _lognormal(draw, *_CONVERSATION["prompt"]), _lognormal(draw, *_CONVERSATION["output"])

        def around(length: int) -> int:
            return max(1, round(length * draw.uniform(1 - self.spread, 1 + self.spread)))

        return around(self.prompt_len), around(self.output_len)


def _text(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def _lognormal(draw: random.Random, median: float, sigma: float, least: int, most: int) -> int:
    return min(most, max(least, round(draw.lognormvariate(math.log(median), sigma))))


def arrival_times(arrivals: Arrivals, rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds at which conversations come, without end. Poisson: exponential gaps. Bursty: gaps of a gamma distribution
    with shape `burstiness` (below 1: clumps; its variance is 1 / burstiness times that of Poisson). Both `rate` a
    second on average. Not for closed loops, where the end of one is the beginning of the next."""
    if arrivals not in ("poisson", "bursty"):
        raise ValueError(f"{arrivals} arrivals have no times")
    if not (rate > 0 and burstiness > 0):
        raise ValueError(f"rate and burstiness must be above 0, not {rate} and {burstiness}")
    draw = random.Random(seed)
    shape = burstiness if arrivals == "bursty" else 1.0
    now = 0.0
    while True:
        yield now
        now += draw.gammavariate(shape, 1.0 / (rate * shape))
