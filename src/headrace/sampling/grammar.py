"""Structured output: a grammar's mask over the next token, by llguidance, as one more ban among the logits stages.

A matcher stands for the tokens that a row's request has output. It follows them when a mask is asked for: forward over
new tokens, back over drafts that were refused. So it keeps nothing that the request table does not say, and after a
preemption it is made anew.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.ops.xp import Array, namespace
from headrace.sampling.params import Grammar
from headrace.sampling.state import SamplingBatch

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64  # compiled grammars
# Seconds of work that a text may cost in all, and besides for each of its masks: what is very ambiguous takes longer
# with every token, and all requests of a step wait for it.
WORK, WORK_A_MASK = 0.5, 0.02
# JSON's own whitespace, but not without end: models that love blanks would never come to the point
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \t\n\r]{0,8}"}


class GrammarError(ValueError):
    """A grammar that cannot be used; the message says why."""


class GrammarCompiler:
    """Makes matchers for one vocabulary. Any thread may call."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Iterable[int]):
        """`tokenizer_json` gives the tokenizer as the `tokenizers` library writes it; called at first use."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()  # of what was made
        self._reading = threading.Lock()  # of the vocabulary
        self._made: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def knows(self, grammar: Grammar) -> bool:
        """Whether `matcher` takes no time to speak of."""
        with self._lock:
            return grammar in self._made

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the beginning of its text. Takes milliseconds the first time, or seconds if the vocabulary has
        not been read yet. GrammarError."""
        with self._lock:
            found = self._made.get(grammar)
        if found is None:
            found = self._compile(grammar)  # outside the lock: whoever wants a known one need not wait
        with self._lock:
            self._made[grammar] = found
            self._made.move_to_end(grammar)
            while len(self._made) > KEPT:
                self._made.popitem(last=False)
            return found.deep_copy()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise GrammarError(
                "structured output needs llguidance: pip install 'headrace[structured]' "
                "(in a clone: pip install -e '.[structured]')"
            ) from None
        try:
            source = _source(grammar)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the {grammar.kind} cannot be read: {error}") from None
        matcher = LLMatcher(self._vocabulary(), source, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"the {grammar.kind} cannot be used: {matcher.get_error().strip()[:500]}")
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():  # as {"$ref": "#"}
            raise GrammarError(f"the {grammar.kind} cannot be used: no text can begin as it says")
        return matcher

    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._reading:
            if self._tokenizer is not None:
                return self._tokenizer
            if not self._eos:
                raise GrammarError("structured output needs a model with an end-of-sequence token")
            try:
                self._tokenizer = LLTokenizer(self._tokenizer_json(), n_vocab=self._vocab_size, eos_token=self._eos)
            except ValueError as error:
                raise GrammarError(f"structured output does not know this kind of tokenizer: {error}") from None
            return self._tokenizer


def _source(grammar: Grammar) -> str:
    """In llguidance's own form."""
    from llguidance import LLMatcher

    if grammar.kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON_OPTIONS)
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON_OPTIONS)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        words = " | ".join(json.dumps(word, ensure_ascii=False) for word in json.loads(grammar.text))
        return LLMatcher.grammar_from_lark(f"start: {words}\n")
    return LLMatcher.grammar_from_lark(grammar.text)


@dataclass
class _Follower:
    """A row's matcher and the output tokens that it stands after."""

    admission: int
    matcher: LLMatcher
    tokens: list[int] = field(default_factory=list)
    asked: int = 0  # masks
    spent: float = 0.0  # seconds of processor time, for all of them

    def mask(self, tokens: Sequence[int], bits: np.ndarray) -> bool:
        """Write down which tokens may come after `tokens`; False if the grammar does not allow these, cannot be
        followed any further, or asks for too much work."""
        began = time.thread_time()
        found = self.follow(tokens)
        if found:
            self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            found = not self.matcher.is_error()
        self.asked += 1
        self.spent += time.thread_time() - began
        return found and self.spent <= WORK + WORK_A_MASK * self.asked

    def follow(self, tokens: Sequence[int]) -> bool:
        """Stand after `tokens`; False if the grammar does not allow them."""
        common = 0
        for own, other in zip(self.tokens, tokens, strict=False):
            if own != other:
                break
            common += 1
        if len(self.tokens) > common:
            self.matcher.rollback(len(self.tokens) - common)
        count = self.matcher.try_consume_tokens(list(tokens[common:])) if len(tokens) > common else 0
        self.tokens = list(tokens[: common + count])
        return len(self.tokens) == len(tokens)


class GrammarTokens:
    """Tokens that a row's grammar does not allow are impossible; at the end of its text only end-of-sequence tokens are
    possible. Behind a draft that it does not allow, nothing is; nor where it takes too much work to go on."""

    def __init__(self, compiler: GrammarCompiler):
        self._compiler = compiler
        self._followers: dict[int, _Follower] = {}  # by row; the last one of each row

    def active(self, batch: SamplingBatch) -> bool:
        return bool(batch.table.constrained[batch.rows].any())

    def apply(self, logits: Array, batch: SamplingBatch) -> Array:
        xp, table = namespace(logits), batch.table
        size = logits.shape[1]
        bits = np.zeros((size + 31) // 32, np.int32)
        for index in table.constrained[batch.rows].nonzero()[0].tolist():
            row = int(batch.rows[index])
            follower = self._follower(row, batch)
            if follower.mask(batch.before(index, int(table.prompt_len[row])).tolist(), bits):
                allowed = np.unpackbits(bits.view(np.uint8), count=size, bitorder="little").view(bool)
                logits[index] = xp.where(xp.asarray(allowed), logits[index], -xp.inf)
            else:
                logits[index] = -xp.inf
        return logits

    def _follower(self, row: int, batch: SamplingBatch) -> _Follower:
        admission, grammar = int(batch.table.admission[row]), batch.table.grammar[row]
        found = self._followers.get(row)
        if found is None or found.admission != admission:
            assert grammar is not None
            found = self._followers[row] = _Follower(admission, self._compiler.matcher(grammar))
        return found
