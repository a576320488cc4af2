"""Token-level stop rules. Stop strings need text and live in the frontend; min_tokens is a logits stage."""

from __future__ import annotations

from headrace.core.request import FinishReason, Request


def accept_tokens(request: Request, tokens: list[int]) -> list[int]:
    """Append `tokens` to the request until one ends it; returns those appended and sets `finish_reason`."""
    taken = []
    for token in tokens:
        request.token_ids.append(token)
        taken.append(token)
        if token in request.stop_ids:
            request.finish_reason = FinishReason.STOP
            break
        if request.num_output >= request.max_new_tokens:
            request.finish_reason = FinishReason.LENGTH
            break
    return taken
