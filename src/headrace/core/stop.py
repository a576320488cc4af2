"""Token-level stop rules. Stop strings need text and live in the frontend; min_tokens is a logits stage."""

from __future__ import annotations

from headrace.core.request import FinishReason, Request


def accept_tokens(request: Request, tokens: list[int]) -> list[int]:
    """Append `tokens` to the request until one ends it; returns those appended and sets `finish_reason`."""
    known, max_len = request.token_ids, request.max_len
    for count, token in enumerate(tokens, start=1):
        known.append(token)
        if token in request.stop_ids:
            request.finish_reason = FinishReason.STOP
            return tokens[:count]
        if len(known) >= max_len:
            request.finish_reason = FinishReason.LENGTH
            return tokens[:count]
    return tokens
