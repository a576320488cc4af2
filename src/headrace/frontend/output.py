"""From tokens to what a user sees: text in whole characters, stop strings, finish reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass
class RequestOutput:
    """A prompt and its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.outputs)


@dataclass(frozen=True)
class Update:
    """What one step added to one choice, ready to be shown."""

    output: RequestOutput
    choice: CompletionOutput
    text: str  # new text; never part of a character or of a stop string
    token_ids: list[int]


class ChoiceStream:
    """Turns one choice's tokens into text as they come."""

    def __init__(self, output: RequestOutput, index: int, params: SamplingParams, tokenizer: Tokenizer):
        self.output = output
        self.choice = output.outputs[index]
        self._params = params
        self._detokenizer = tokenizer.detokenizer(params.skip_special_tokens)
        self._stops = StopStrings(params.stop)
        self._pending = ""  # text that may yet belong to a stop string

    def add(self, news: TokenOutput) -> Update:
        """Take in a step's tokens. The choice's finish_reason is set when it ended, by the core or by a stop string;
        in the second case the caller must abort the request in the core."""
        choice, shown, taken = self.choice, "", []
        for position, token in enumerate(news.token_ids):
            taken.append(token)
            choice.token_ids.append(token)
            last = news.finish_reason == FinishReason.STOP and position == len(news.token_ids) - 1
            if last:
                choice.stop_reason = token
                if not self._params.include_stop_str_in_output:
                    break  # the token that ends the text is not part of it
            shown += self._take(self._detokenizer.add([token]))
            if choice.finish_reason is not None:
                break
        if choice.finish_reason is None and news.finish_reason is not None:
            shown += self._take(self._detokenizer.finish())
            if choice.finish_reason is None:
                shown += self._pending
                choice.finish_reason = str(news.finish_reason)
                choice.error = news.error
        choice.text += shown
        return Update(self.output, choice, shown, taken)

    def _take(self, piece: str) -> str:
        """Text that can be shown now that `piece` came."""
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
