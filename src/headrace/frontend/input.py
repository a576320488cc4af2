"""From what a user gives to core requests: tokens, resolved parameters, one request a choice."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.core.beam import BeamGroup
from headrace.core.request import Request, RequestError
from headrace.frontend.tokenizer import Tokenizer
from headrace.models.spec import ModelSpec
from headrace.sampling.grammar import GrammarCompiler, GrammarError
from headrace.sampling.params import BadWords, SamplingParams

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Prepared:
    """A checked prompt and its core requests, one a choice."""

    prompt: str | None
    token_ids: list[int]
    requests: list[Request]  # one a choice; of a beam search, one a member
    queue: list[Request]  # those to be given to the core; a beam's leader brings the others


MAX_PRIORITY = 1_000_000
_SHORT = 8  # characters a token: texts up to this long are cut into tokens without a look at their length


def _index(token: object, vocab_size: int) -> int:
    try:
        value = -1 if isinstance(token, (bool, np.bool_)) else operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        value = -1
    if not 0 <= value < vocab_size:
        raise RequestError(f"prompt token ids must be integers in [0, {vocab_size}), not {token!r}")
    return value


class InputProcessor:
    """Checks prompts and makes requests."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: ModelSpec,
        max_model_len: int,
        grammars: GrammarCompiler | None = None,
        proposers: Sequence[str] = (),
    ):
        """Without `grammars` those of requests are not checked. `proposers` of drafts are the engine's."""
        self._proposers = proposers
        self._tokenizer = tokenizer
        self._spec = spec
        self._max_model_len = max_model_len
        self._grammars = grammars
        self._longest = 0  # bytes of the longest token; found when first needed
        self._spellings: dict[bytes, list[int]] = {}  # token ids of each spelling; made when first needed

    def tokens(self, prompt: Prompt, *, add_special: bool = True) -> list[int]:
        """Token ids of a text, or ids as given (integers, numpy's too), checked against the model's vocabulary."""
        if isinstance(prompt, str):
            self._check_length(prompt)
            ids = self._tokenizer.encode(prompt, add_special=add_special)
        elif isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise RequestError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}")
        else:
            ids = list(prompt)
            if not (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self._spec.vocab_size):
                ids = [_index(token, self._spec.vocab_size) for token in ids]
        if ids and max(ids) >= self._spec.vocab_size:  # the tokenizer knows more tokens than the model has rows for
            raise RequestError(
                f"the text holds token {max(ids)}, which the tokenizer knows but the model does not "
                f"(its vocabulary has {self._spec.vocab_size} tokens)"
            )
        return ids

    def _check_length(self, text: str) -> None:
        """Refuse what cannot fit before it is cut into tokens, which takes long for long texts."""
        if len(text) <= _SHORT * self._max_model_len:
            return
        if not self._longest:
            self._longest = max(len(self._tokenizer.token_bytes(id)) for id in range(self._tokenizer.vocab_size))
        least = len(text) // max(1, self._longest)
        if least >= self._max_model_len:
            raise RequestError(
                f"the prompt has {len(text)} characters, at least {least} tokens, but at most {self._max_model_len} fit"
            )

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        add_special: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Prepared:
        """Requests `request_id` (one choice) or `request_id/0`, `request_id/1` ... for a prompt. RequestError names
        what in `params` this model cannot do."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
            raise RequestError(f"priority must be an integer between -{MAX_PRIORITY} and {MAX_PRIORITY}: {priority!r}")
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt must be a text, not {type(cache_salt).__name__}")
        ids = self.tokens(prompt, add_special=add_special)
        if params.draft_method is not None and params.draft_method not in self._proposers and params.draft_tokens != 0:
            have = ", ".join(self._proposers) or "none: start it with speculate=auto"
            raise RequestError(
                f"draft_method {params.draft_method}: this engine has no such proposer (it has {have})", "speculative"
            )
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", dict(params.logit_bias))
        if params.grammar is not None and self._grammars is not None:
            try:
                self._grammars.matcher(params.grammar)
            except GrammarError as error:
                raise RequestError(str(error)) from None
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._spec.eos_token_ids
        bad_words = self._bad_words(params.bad_words)
        self._check_choice(params, stop_ids, bad_words)
        if params.num_choices > params.n and params.logprobs is None:
            params = params.with_(logprobs=0)  # best_of compares them
        # every choice has the same prompt: the first one reports it
        later = params if params.prompt_logprobs is None else params.with_(prompt_logprobs=None)
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little", signed=True)
        group = None
        if params.beam_width is not None:
            group = BeamGroup(params.beam_width, params.n, params.length_penalty, params.early_stopping)
        count = params.num_choices if group is None else group.width
        requests: list[Request] = []
        for choice in range(count):
            requests.append(
                Request(
                    id=request_id if count == 1 else f"{request_id}/{choice}",
                    prompt_token_ids=ids,
                    params=later if choice else params,
                    max_new_tokens=params.max_tokens or self._max_model_len,
                    stop_ids=stop_ids,
                    seed=seed,
                    choice=choice,
                    priority=priority,
                    bad_words=bad_words,
                    cache_salt=cache_salt,
                    beam=group,
                    leader=requests[0] if choice else None,  # shares its prompt's blocks
                )
            )
        if group is not None:
            group.members = requests
        return Prepared(prompt if isinstance(prompt, str) else None, ids, requests, requests[: 1 if group else count])

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for token in ids:
            if token >= self._spec.vocab_size:
                raise RequestError(f"{name}: {token} is outside the vocabulary of {self._spec.vocab_size}")

    def _bad_words(self, words: Sequence[str]) -> BadWords | None:
        if not words:
            return None
        if not self._spellings:
            for token in range(self._spec.vocab_size):
                self._spellings.setdefault(self._tokenizer.token_bytes(token), []).append(token)
            self._spellings.pop(b"", None)
        return BadWords.compile(words, self._spellings)

    @staticmethod
    def _check_choice(params: SamplingParams, stop_ids: frozenset[int], bad_words: BadWords | None) -> None:
        """Refuse what leaves no token for the first position; later ones are judged when they come."""
        if params.allowed_token_ids is None:
            return
        left = set(params.allowed_token_ids)
        if bad_words is not None:
            left -= set(bad_words.banned(()))
        if not left:
            raise RequestError("no token is left: bad_words ban every one of allowed_token_ids")
        if params.min_tokens and not left - stop_ids:
            raise RequestError(
                "no token is left: all that allowed_token_ids allow would end the text, and min_tokens forbids that"
            )
