"""From what a user gives to core requests: tokens, resolved parameters, one request a choice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.request import Request, RequestError
from headrace.frontend.tokenizer import Tokenizer
from headrace.models.spec import ModelSpec
from headrace.sampling.params import SamplingParams

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Prepared:
    """A checked prompt and its core requests, one a choice."""

    prompt: str | None
    token_ids: list[int]
    requests: list[Request]


class InputProcessor:
    """Checks prompts and makes requests."""

    def __init__(self, tokenizer: Tokenizer, spec: ModelSpec, max_model_len: int):
        self._tokenizer = tokenizer
        self._spec = spec
        self._max_model_len = max_model_len

    def tokens(self, prompt: Prompt, *, add_special: bool = True) -> list[int]:
        """Token ids of a text, or ids as given, checked against the vocabulary."""
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, add_special=add_special)
        ids = list(prompt)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._spec.vocab_size:
                raise RequestError(f"prompt token ids must be integers in [0, {self._spec.vocab_size}), not {token!r}")
        return ids

    def prepare(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, add_special: bool = True, priority: int = 0
    ) -> Prepared:
        """Requests `request_id` (one choice) or `request_id/0`, `request_id/1` ... for a prompt."""
        ids = self.tokens(prompt, add_special=add_special)
        for token in params.stop_token_ids:
            if token >= self._spec.vocab_size:
                raise RequestError(f"stop_token_ids: {token} is outside the vocabulary of {self._spec.vocab_size}")
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self._spec.eos_token_ids
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(8), "little", signed=True)
        requests = [
            Request(
                id=request_id if params.n == 1 else f"{request_id}/{choice}",
                prompt_token_ids=ids,
                params=params,
                max_new_tokens=params.max_tokens or self._max_model_len,
                stop_ids=stop_ids,
                seed=seed,
                choice=choice,
                priority=priority,
            )
            for choice in range(params.n)
        ]
        return Prepared(prompt if isinstance(prompt, str) else None, ids, requests)
