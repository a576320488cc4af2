"""Finished outputs as bodies of OpenAI's chat or completions API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from headrace.core.plan import TokenLogprobs
from headrace.frontend.openai_request import CHAT, BodyRequest
from headrace.frontend.output import CompletionOutput, RequestOutput
from headrace.frontend.tokenizer import Tokenizer


def response_body(
    request: BodyRequest, outputs: Sequence[RequestOutput], tokenizer: Tokenizer, *, model: str, response_id: str
) -> dict[str, Any]:
    """The answer to a body: one output for a chat, one a prompt for completions; all must have finished.

    `created` is now. Usage counts a prompt once however many choices it has, and every token that was generated.
    """
    chat = request.url == CHAT
    choices: list[dict[str, Any]] = []
    for output in outputs:
        for choice in output.outputs:
            index = len(choices)
            make = _chat_choice if chat else _choice
            choices.append(make(choice, index, tokenizer, request.params.logprobs or 0))
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    completion_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {
        "id": response_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        },
    }


def error_body(message: str, *, kind: str = "invalid_request_error", param: str | None = None) -> dict[str, Any]:
    """The body of a refusal."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def _chat_choice(choice: CompletionOutput, index: int, tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        entries = zip(choice.token_ids, choice.logprobs, strict=False)
        content = [_position(token, entry, tokenizer, num_top) for token, entry in entries]
        logprobs = {"content": content, "refusal": None}
    return {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }


def _position(token: int, entry: TokenLogprobs, tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
    def one(token: int) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": entry[token].logprob, "bytes": list(data)}

    return {**one(token), "top_logprobs": [one(each) for each in entry if entry[each].rank <= num_top]}


def _choice(choice: CompletionOutput, index: int, tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:

        def text(token: int) -> str:
            return tokenizer.token_bytes(token).decode("utf-8", "replace")

        tokens = [text(token) for token in choice.token_ids[: len(choice.logprobs)]]
        offsets, end = [], 0
        for token in tokens:
            offsets.append(end)
            end += len(token)
        logprobs = {
            "tokens": tokens,
            "token_logprobs": [e[t].logprob for t, e in zip(choice.token_ids, choice.logprobs, strict=False)],
            "top_logprobs": [
                {text(token): each.logprob for token, each in entry.items() if each.rank <= num_top}
                for entry in choice.logprobs
            ],
            "text_offset": offsets,
        }
    return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}
