"""Token-level stop rules. Stop strings need text and live in the frontend; min_tokens is a logits stage."""

from __future__ import annotations

from headrace.core.plan import TokenLogprobs
from headrace.core.request import FinishReason, Request, TokenOutput


def accept_tokens(request: Request, tokens: list[int]) -> list[int]:
    """Append `tokens` to the request until one ends it, and drop those behind it, which nobody is told of nor counts;
    returns those appended and sets `finish_reason`."""
    known, max_len = request.token_ids, request.max_len
    for count, token in enumerate(tokens, start=1):
        known.append(token)
        if token in request.stop_ids:
            request.finish_reason = FinishReason.STOP
        elif len(known) >= max_len:
            request.finish_reason = FinishReason.LENGTH
        else:
            continue
        del tokens[count:]
        break
    return tokens


def accept(request: Request, tokens: list[int], logprobs: list[TokenLogprobs] | None = None) -> list[TokenOutput]:
    """`accept_tokens`, and what is to be told then, with the tokens' `logprobs`; nothing of a quiet request that goes
    on. Such a request has no logprobs but its prompt's."""
    taken = accept_tokens(request, tokens)
    if request.quiet:
        if request.finish_reason is None:
            return []
        taken = request.untold_ids
    first = len(taken) == request.num_output
    return [
        TokenOutput(
            request.id,
            taken,
            request.finish_reason,
            logprobs=logprobs and logprobs[: len(taken)],
            prompt_logprobs=request.prompt_logprobs if first and request.wants_prompt_logprobs else None,
            num_cached=request.num_cached,
        )
    ]


def broken_off(request: Request, reason: FinishReason, error: str | None = None) -> TokenOutput:
    """What is to be told of a request that ends before its time."""
    untold = request.untold_ids
    if not untold:
        return TokenOutput(request.id, [], reason, error)
    prompt_logprobs = request.prompt_logprobs if request.wants_prompt_logprobs else None
    return TokenOutput(
        request.id, untold, reason, error, prompt_logprobs=prompt_logprobs, num_cached=request.num_cached
    )
