"""From tokens to what a user sees: text in whole characters, stop strings, finish reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.core.plan import TokenLogprobs
from headrace.core.request import FinishReason, TokenOutput
from headrace.frontend.stop_strings import StopStrings
from headrace.frontend.tokenizer import Tokenizer
from headrace.sampling.params import SamplingParams


@dataclass
class CompletionOutput:
    """One choice. `token_ids` holds every token that was generated and counted, the one that ended it included."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    error: str | None = None
    score: float | None = None  # beam search: log-probability / length ** length_penalty
    logprobs: list[TokenLogprobs] | None = None  # of each of token_ids, if asked for: {token id: Logprob}, best first
    cumulative_logprob: float | None = None  # of all of token_ids, if logprobs or best_of asked for it

    @property
    def merit(self) -> tuple[bool, float]:
        """What best_of prefers: choices that came to an end, then the highest log-probability per token."""
        whole = self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if self.cumulative_logprob is None or not self.token_ids:
            return whole, float("-inf")
        return whole, self.cumulative_logprob / len(self.token_ids)


@dataclass
class RequestOutput:
    """A prompt and its choices. With best_of above n these are candidates until all have ended, then the n best."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # of each prompt token, if asked for; of the first, None
    num_cached_tokens: int = 0  # of the prompt: found in the prefix cache

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.outputs)

    def keep_best(self, count: int) -> None:
        """Drop all choices but the best `count`, best first, and number them anew."""
        self.outputs = sorted(self.outputs, key=lambda choice: choice.merit, reverse=True)[:count]
        for index, choice in enumerate(self.outputs):
            choice.index = index


@dataclass(slots=True)  # a frozen one takes longer to make, and every token of a stream has its own
class Update:
    """What one step added to one choice, ready to be shown."""

    output: RequestOutput
    choice: CompletionOutput
    text: str  # new text; never part of a character or of a stop string
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # of each of token_ids, if asked for


class ChoiceStream:
    """Turns one choice's tokens into text as they come."""

    def __init__(
        self,
        output: RequestOutput,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer,
        kept: frozenset[int] = frozenset(),
    ):
        """`kept`: special tokens that are in the text whatever the parameters say."""
        self.output = output
        self.choice = output.outputs[index]
        self._params = params
        if params.logprobs is not None:
            self.choice.logprobs = []
        self._detokenizer = tokenizer.detokenizer(params.skip_special_tokens, kept)
        self._stops = StopStrings(params.stop)
        self._pending = ""  # text that may yet belong to a stop string

    def add(self, news: TokenOutput) -> list[Update]:
        """Take in a step's tokens and return what can be shown: this choice's update, or with best_of above n nothing
        until the last candidate ended, and then each of the best in whole.

        The choice's finish_reason is set when it ended, by the core or by a stop string; in the second case the caller
        must abort the request in the core.
        """
        update = self._extend(news)
        if self._params.num_choices == self._params.n:
            return [update]
        if not self.output.finished:
            return []
        self.output.keep_best(self._params.n)
        return [Update(self.output, best, best.text, best.token_ids, best.logprobs) for best in self.output.outputs]

    def _extend(self, news: TokenOutput) -> Update:
        choice = self.choice
        if news.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None, *news.prompt_logprobs]
        if news.score is not None:
            choice.score = news.score
        if not choice.token_ids and choice.index == 0:
            self.output.num_cached_tokens = news.num_cached
        taken, shown = self._watch(news) if self._params.stop else self._add_all(news)
        if choice.finish_reason is None and news.finish_reason is not None:
            shown += self._take(self._detokenizer.finish())
            if choice.finish_reason is None:
                shown += self._pending
                choice.finish_reason = str(news.finish_reason)
                choice.error = news.error
        choice.text += shown
        return Update(self.output, choice, shown, taken, self._report(taken, news.logprobs))

    def _add_all(self, news: TokenOutput) -> tuple[list[int], str]:
        """(tokens, text) of a step, where no stop string may end them early."""
        told = shown = news.token_ids
        self.choice.token_ids.extend(told)
        if news.finish_reason == FinishReason.STOP and told:
            self.choice.stop_reason = told[-1]
            if not self._params.include_stop_str_in_output:
                shown = told[:-1]  # the token that ends the text is not part of it
        return told, self._detokenizer.add(shown)

    def _watch(self, news: TokenOutput) -> tuple[list[int], str]:
        """The same, up to the first stop string."""
        choice, taken, shown = self.choice, [], ""
        for position, token in enumerate(news.token_ids):
            taken.append(token)
            choice.token_ids.append(token)
            last = news.finish_reason == FinishReason.STOP and position == len(news.token_ids) - 1
            if last:
                choice.stop_reason = token
                if not self._params.include_stop_str_in_output:
                    break
            shown += self._take(self._detokenizer.add([token]))
            if choice.finish_reason is not None:
                break
        return taken, shown

    def _report(self, taken: list[int], logprobs: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
        """Those of the tokens taken, if the user asked for them."""
        choice, entries = self.choice, (logprobs or [])[: len(taken)]
        if logprobs is not None:
            new = sum(entry[token].logprob for token, entry in zip(taken, entries, strict=True))
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + new
        if choice.logprobs is None:
            return None
        choice.logprobs += entries
        return entries

    def _take(self, piece: str) -> str:
        """Text that can be shown now that `piece` came."""
        if not self._params.stop:  # what the end leaves
            return piece
        allowed = len(self.choice.token_ids) >= self._params.min_tokens
        hit = self._stops.feed(piece, allowed)
        if hit is not None:
            length, used = hit
            text = self._pending + piece[:used]
            self.choice.finish_reason = str(FinishReason.STOP)
            self.choice.stop_reason = text[-length:]
            self._pending = ""
            return text if self._params.include_stop_str_in_output else text[:-length]
        text = self._pending + piece
        cut = len(text) - self._stops.held
        self._pending = text[cut:]
        return text[:cut]
