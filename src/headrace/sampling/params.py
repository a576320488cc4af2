"""SamplingParams: how one request's tokens are chosen and when it ends. Checked when made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from headrace.config import PROPOSERS, option

MAX_CHOICES = 128
MAX_STOPS = 128
MAX_STOP_LENGTH = 4096  # characters
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 128  # bytes of UTF-8
MAX_BAD_WORD_BYTES = 8192  # of all together; compiling takes time with each word's length squared
MAX_LOGPROBS = 20
MAX_TOKEN_ID = 2**31 - 1
MAX_GRAMMAR = 1 << 18  # characters
# the error of a request whose own parameters leave nothing to say
NONE_ALLOWED = (
    "no token is allowed here: allowed_token_ids, bad_words, min_tokens and the grammar leave none, or the grammar is "
    "too ambiguous to be followed any further"
)
GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Grammar:
    """The form that an answer must have. `text` is a JSON schema, a regular expression, a JSON list of the strings to
    choose from, or a grammar in llguidance's dialect of Lark; of json_object, nothing."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise ValueError(f"grammar: kind must be one of {', '.join(get_args(GrammarKind))}, not {self.kind!r}")
        if not isinstance(self.text, str):
            raise ValueError(f"grammar: text must be a string, not {_short(self.text)}")
        if len(self.text) > MAX_GRAMMAR:
            raise ValueError(f"grammar: text may have {MAX_GRAMMAR} characters, not {len(self.text)}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Defaults are those of plain sampling; `temperature=0` is greedy. Bad values raise ValueError naming the field.

    Order of the stages: bans (min_tokens, allowed_token_ids, bad_words, grammar), repetition_penalty, then
    presence_penalty and frequency_penalty, logit_bias, temperature, top_k, top_p (over what top_k kept), min_p
    (relative to the best token), then the draw. Nothing brings back a banned token. Penalties come before the bias, so
    a bias is worth the same whatever was said before; both act on greedy requests too.

    Log-probabilities are the model's own: before any of these stages, greedy or not.
    """

    temperature: float = option(1.0, "0 is greedy; tiny values are honoured")
    top_k: int = option(0, "keep the k best tokens; 0 (or -1) keeps all")
    top_p: float = option(1.0, "keep the smallest set of best tokens whose probability reaches p")
    min_p: float = option(0.0, "keep tokens at least min_p times as likely as the best")
    repetition_penalty: float = option(1.0, "above 1: tokens of prompt and output become less likely (logits / or *)")
    presence_penalty: float = option(0.0, "taken off the logits of tokens that the output holds (-2 to 2)")
    frequency_penalty: float = option(0.0, "taken off a token's logit for each time the output holds it (-2 to 2)")
    # token id -> what is added to its logit (-100 to 100); kept as pairs in order of ids. No flag: not worth a syntax
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = option(None, "only these tokens are possible; none: all are")
    bad_words: tuple[str, ...] = option((), "never write these words, however they are cut into tokens")
    seed: int | None = option(None, "same seed, same text, in any company; none: a seed is drawn")
    n: int = option(1, "independent choices")
    best_of: int | None = option(None, "generate so many choices and keep the n with the best logprob per token")
    beam_width: int | None = option(None, "beam search over so many sequences (temperature 0); returns the n best")
    length_penalty: float = option(1.0, "beam search: scores are log-probability / length ** this")
    early_stopping: bool = option(False, "beam search: end as soon as beam_width sequences have ended")
    draft_tokens: int | None = option(None, "most tokens drafted at a time where the engine speculates; 0: none")
    draft_method: str | None = option(
        None, f"who drafts for this request ({', '.join(PROPOSERS)}), of those that the engine has; none: who pays most"
    )
    max_tokens: int | None = option(None, "most tokens to generate; none: until the model's limit")
    min_tokens: int = option(0, "no end of sequence and no stop before this many tokens")
    stop: tuple[str, ...] = option((), "the text ends before the first of these strings")
    stop_token_ids: tuple[int, ...] = option((), "these tokens end the text, as the end of sequence does")
    include_stop_str_in_output: bool = option(False, "leave the stop string, or the token that ended it, in the text")
    ignore_eos: bool = option(False, "go on after the end-of-sequence token")
    skip_special_tokens: bool = option(True, "leave special tokens out of the text; token ids always hold all")
    # how many of the likeliest tokens to report beside the chosen one (or the prompt's); None reports nothing. No
    # flags: the command line prints text only
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None  # the answer has this form, if it comes to its end. No flag: a schema is no option

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        _number("temperature", self.temperature, 0.0, 1e6)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        set_(self, "top_k", max(0, self.top_k))
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        set_(self, "logit_bias", _bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ValueError("allowed_token_ids must hold at least one token id; None allows all")
            set_(self, "allowed_token_ids", tuple(sorted(set(allowed))))
        set_(self, "bad_words", _bad_words(self.bad_words))
        for name, low, high in (
            ("seed", -(2**63), 2**63 - 1),
            ("max_tokens", 1, 2**31 - 1),
            ("best_of", 1, MAX_CHOICES),
            ("beam_width", 1, MAX_CHOICES),
            ("draft_tokens", 0, 2**31 - 1),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low, high)
        if self.draft_method is not None and self.draft_method not in PROPOSERS:
            raise ValueError(f"draft_method must be one of {', '.join(PROPOSERS)}, not {_short(self.draft_method)}")
        _integer("n", self.n, 1, MAX_CHOICES)
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) is below n ({self.n})")
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        set_(self, "stop", _strings("stop", self.stop, MAX_STOPS))
        for text in self.stop:
            if len(text) > MAX_STOP_LENGTH:
                raise ValueError(f"stop: a string may have {MAX_STOP_LENGTH} characters, not {len(text)}")
        set_(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ValueError(f"grammar must be a Grammar, not {_short(self.grammar)}")
        if self.grammar is not None and self.ignore_eos:
            raise ValueError("ignore_eos and a grammar exclude each other: a text of that form has an end")
        _number("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.beam_width is not None:
            self._check_beam()
        for name in ("early_stopping", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")

    def _check_beam(self) -> None:
        if self.n > (self.beam_width or 0):
            raise ValueError(f"n ({self.n}) is above beam_width ({self.beam_width}), all that a beam ends with")
        absent = dict.fromkeys(("best_of", "logprobs", "prompt_logprobs", "grammar"))
        for name, wanted in {"temperature": 0, **absent}.items():
            if getattr(self, name) != wanted:
                raise ValueError(f"beam search needs {name}={wanted}, not {getattr(self, name)!r}")

    def with_(self, **changes: Any) -> SamplingParams:
        """A changed copy, checked again."""
        return replace(self, **changes)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_simple(self) -> bool:
        """A token depends on its logits and these alone: temperature, top_k, top_p, min_p, the seed. What came before
        it, or is to be told of it, plays no part."""
        return (
            self.repetition_penalty == 1.0
            and self.presence_penalty == self.frequency_penalty == 0.0
            and not (self.logit_bias or self.bad_words or self.min_tokens or self.beam_width)
            and self.allowed_token_ids is None
            and self.grammar is None
            and self.logprobs is self.prompt_logprobs is None
            and self.num_choices == self.n
        )

    @property
    def num_choices(self) -> int:
        """Choices to generate; `n` of them are returned."""
        return self.best_of or self.n


@dataclass(frozen=True)
class BadWords:
    """Words as the token sequences that spell them: the prefix of a word written so far, and what each token makes of
    it. Every way to cut a word (or a space and the word) into whole tokens is here; a token that holds more than the
    word, as "the" holds "he", is another word and is not."""

    steps: Mapping[bytes, Mapping[int, bytes]]  # prefix -> token -> longer prefix
    bans: Mapping[bytes, tuple[int, ...]]  # prefix -> tokens that would finish a word
    longest: int = field(default=0)  # most tokens that a prefix can have

    @classmethod
    def compile(cls, words: Iterable[str], spellings: Mapping[bytes, Sequence[int]]) -> BadWords:
        """From words and the token ids of each spelling in the vocabulary."""
        steps: dict[bytes, dict[int, bytes]] = {}
        bans: dict[bytes, set[int]] = {}
        longest = 0
        for word in words:
            for text in (word.lstrip(" ").encode(), b" " + word.lstrip(" ").encode()):
                for start in range(len(text)):
                    for end in range(start + 1, len(text)):
                        for token in spellings.get(text[start:end], ()):
                            steps.setdefault(text[:start], {})[token] = text[:end]
                    bans.setdefault(text[:start], set()).update(spellings.get(text[start:], ()))
                longest = max(longest, len(text) - 1)
        return cls(steps, {prefix: tuple(sorted(ids)) for prefix, ids in bans.items() if ids}, longest)

    def banned(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that would finish a word after `tokens`."""
        prefixes = {b""}
        for token in tokens[-self.longest :] if self.longest else ():
            longer = (self.steps[prefix].get(token) for prefix in prefixes if prefix in self.steps)
            prefixes = {b"", *(prefix for prefix in longer if prefix is not None)}
        return sorted({token for prefix in prefixes for token in self.bans.get(prefix, ())})


def _number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    # the range is asked before isfinite, which cannot take an integer beyond the floats
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    if value < low or value > high or (low_open and value == low):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, not {value!r}")
        bracket = "(" if low_open else "["
        raise ValueError(f"{name} must be in {bracket}{low:g}, {high:g}], not {_short(value)}")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, not {_short(value)}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}, not {_short(value)}")


def _short(value: Any) -> str:
    """How a refused value is shown. Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _items(name: str, value: Any, what: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of {what}, not {_short(value)}")
    return tuple(value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _items(name, value, "token ids")
    for token in ids:
        _integer(name, token, 0, MAX_TOKEN_ID)
    return ids


def _strings(name: str, value: Any, most: int) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _items(name, value, "strings")
    if len(texts) > most:
        raise ValueError(f"{name} takes at most {most} strings, not {len(texts)}")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must hold non-empty strings, not {_short(text)}")
    return texts


def _bad_words(value: Any) -> tuple[str, ...]:
    words = _strings("bad_words", value, MAX_BAD_WORDS)
    total = 0
    for word in words:
        if not word.strip(" "):
            raise ValueError("bad_words: a word cannot be made of spaces alone")
        try:
            length = len(word.encode())
        except UnicodeEncodeError:
            raise ValueError("bad_words: a word holds half of a surrogate pair, which is no character") from None
        if length > MAX_BAD_WORD_LENGTH:
            raise ValueError(f"bad_words: a word may have {MAX_BAD_WORD_LENGTH} bytes, not {length}")
        total += length
    if total > MAX_BAD_WORD_BYTES:
        raise ValueError(f"bad_words may have {MAX_BAD_WORD_BYTES} bytes together, not {total}")
    return words


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs in order of token ids. A key may be a string of digits, since the keys of a JSON object are strings."""
    if value is None:
        return ()
    if not isinstance(value, (Mapping, tuple)):
        raise ValueError(f"logit_bias must map token ids to numbers, not {_short(value)}")
    pairs: dict[int, float] = {}
    for item in value.items() if isinstance(value, Mapping) else value:
        if not isinstance(item, tuple) or len(item) != 2:
            raise ValueError(f"logit_bias must map token ids to numbers, not {_short(value)}")
        key, bias = item
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
            key = int(key)
        _integer("logit_bias: a token id", key, 0, MAX_TOKEN_ID)
        _number(f"logit_bias: the bias of token {key}", bias, -100.0, 100.0)
        if key in pairs:
            raise ValueError(f"logit_bias names token {key} twice")
        pairs[key] = float(bias)
    return tuple(sorted(pairs.items()))
