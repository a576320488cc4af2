"""Answers in the shapes of OpenAI's API: whole bodies and the chunks of a stream, for chat and for completions.

Log-probabilities are the model's own, before any sampling option (sampling/logprobs.py); every token that is counted
has an entry, the end-of-sequence token included. A token that is a part of a character is named "bytes:\\xNN..".
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.core.plan import TokenLogprobs
from headrace.frontend.tokenizer import IncrementalDetokenizer, Tokenizer
from headrace.server.endpoint import AnswerShape
from headrace.server.http import DONE, encode_json, event
from headrace.server.job import Delta, Job
from headrace.server.parsers.base import AnswerParser, Pieces, joined_calls
from headrace.server.protocol import ApiRequest


def usage(job: Job) -> dict[str, Any]:
    """A prompt counts once however many choices it has; candidates of best_of that were dropped count."""
    prompt = sum(len(each.token_ids) for each in job.prompts)
    completion = 0 if job.request.no_output else job.completion_tokens
    told: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
    }
    if job.request.plan is not None and job.request.plan.thinks:
        told["completion_tokens_details"] = {"reasoning_tokens": job.reasoning_tokens}
    return told


class _Names:
    """How tokens are written in log-probabilities."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool):
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def __call__(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatLogprobs:
    """The `logprobs` of chat: an object per token."""

    def __init__(self, tokenizer: Tokenizer, request: ApiRequest):
        self._tokenizer = tokenizer
        self._name = _Names(tokenizer, request.as_token_ids)
        self._num_top = request.params.logprobs or 0

    def take(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        content = [self._position(token, entry or {}) for token, entry in zip(token_ids, entries, strict=True)]
        return {"content": content, "refusal": None}

    def _position(self, token: int, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._one(each, entry) for each in entry if entry[each].rank <= self._num_top]
        return {**self._one(token, entry), "top_logprobs": top}

    def _one(self, token: int, entry: TokenLogprobs) -> dict[str, Any]:
        return {
            "token": self._name(token),
            "logprob": entry[token].logprob,
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


class TextLogprobs:
    """The `logprobs` of completions: parallel lists. `text_offset` goes on from call to call, in characters."""

    def __init__(self, tokenizer: Tokenizer, request: ApiRequest):
        self._name = _Names(tokenizer, request.as_token_ids)
        self._detokenizer: IncrementalDetokenizer = tokenizer.detokenizer(request.params.skip_special_tokens)
        self._offset = 0

    def take(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        offsets = []
        for token in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.add([token]))
        pairs = list(zip(token_ids, entries, strict=True))
        return {
            "tokens": [self._name(token) for token in token_ids],
            "token_logprobs": [None if entry is None else entry[token].logprob for token, entry in pairs],
            "top_logprobs": [
                None if entry is None else {self._name(each): entry[each].logprob for each in entry}
                for _, entry in pairs
            ],
            "text_offset": offsets,
        }


class Shape(AnswerShape):
    """The common part: what every body and chunk of an answer begins with."""

    def __init__(self, job: Job, model: str, tokenizer: Tokenizer):
        self._job = job
        self._request = job.request
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())
        kind = "chat.completion" if job.request.chat else "text_completion"
        self._kind = kind + ".chunk" if job.request.chat and job.request.body.stream else kind
        head = encode_json(self._head())
        self._prefix = b"data: " + head[:-1] + b',"choices":[{"index":'
        self._usage = b',"usage":null' if job.request.include_usage else b""
        self._logprobs: dict[int, ChatLogprobs | TextLogprobs] = {}  # of each choice
        plan = job.request.plan
        self._plan = None if plan is None or plan.is_plain else plan
        self._parsers: dict[int, AnswerParser] = {}  # of each choice, where not all text is content

    def _head(self) -> dict[str, Any]:
        return {"id": self._job.id, "object": self._kind, "created": self._created, "model": self._model}

    def _writer(self, index: int) -> ChatLogprobs | TextLogprobs:
        if index not in self._logprobs:
            kind = ChatLogprobs if self._request.chat else TextLogprobs
            self._logprobs[index] = kind(self._tokenizer, self._request)
        return self._logprobs[index]

    # -- a whole answer

    def body(self) -> bytes:
        choices = []
        for number, output in enumerate(self._job.outputs):
            for choice in output.outputs:
                index = number * self._request.params.n + choice.index
                text, tokens, entries = choice.text, choice.token_ids, choice.logprobs
                if self._request.no_output:
                    text, tokens, entries = "", [], None if entries is None else []
                reason = "length" if self._request.no_output else choice.finish_reason
                choices.append(self._choice(index, number, text, tokens, entries, reason))
        return encode_json({**self._head(), "choices": choices, "usage": usage(self._job)})

    def _choice(
        self,
        index: int,
        number: int,
        text: str,
        tokens: Sequence[int],
        entries: Sequence[TokenLogprobs] | None,
        reason: str | None,
    ) -> dict[str, Any]:
        if self._request.chat:
            logprobs = None if entries is None else self._writer(index).take(tokens, entries)
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if self._plan is not None:
                pieces = self._split(index, text, ended=True)
                message["content"] = pieces.content
                if pieces.reasoning:
                    message |= {"reasoning_content": pieces.reasoning, "reasoning": pieces.reasoning}
                if pieces.calls:
                    message |= {"content": pieces.content or None, "tool_calls": joined_calls(pieces.calls)}
                    reason = _reason(reason)
            return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        if self._request.echo:
            text = self.prompt_text(number) + text
            if entries is not None:
                output = self._job.outputs[number]
                tokens = [*output.prompt_token_ids, *tokens]
                prompt: Sequence[TokenLogprobs | None] = output.prompt_logprobs or [None]
                logprobs = self._writer(index).take(tokens, [*prompt, *entries])
                return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        logprobs = None if entries is None else self._writer(index).take(tokens, entries)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def prompt_text(self, number: int) -> str:
        """A prompt as it came, or as its tokens read."""
        prompt = self._job.prompts[number]
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, self._request.params.skip_special_tokens)

    def _split(self, index: int, text: str, *, ended: bool) -> Pieces:
        """What a choice's next text is."""
        assert self._plan is not None
        if index not in self._parsers:
            self._parsers[index] = self._plan.parser()
        parser = self._parsers[index]
        pieces = parser.feed(text)
        if ended:
            pieces.add(parser.finish())
        if not self._request.reasoning:
            pieces.reasonings.clear()
        return pieces

    # -- a stream

    def opening(self) -> Iterator[bytes]:
        """Events before any text: who speaks, or the prompts where they are echoed without logprobs."""
        count = len(self._job.prompts) * self._request.params.n
        for index in range(count):
            if self._request.chat:
                yield self._event(index, b'"delta":{"role":"assistant","content":""}', b"null", None)
            elif self._request.echo and self._request.params.logprobs is None:
                text = self.prompt_text(index // self._request.params.n)
                yield self._event(index, b'"text":' + encode_json(text), b"null", None)

    def chunk(self, delta: Delta, first: bool) -> bytes:
        """The event of a delta; b"" where there is nothing to tell. `first`: the first of its choice."""
        text, tokens, reason = delta.text, delta.token_ids, delta.finish_reason
        entries: Sequence[TokenLogprobs | None] | None = delta.logprobs
        if self._request.no_output:
            text, tokens, entries = "", [], None if entries is None else []
            reason = "length" if reason is not None else None
        if first and self._request.echo and entries is not None:
            number = delta.index // self._request.params.n
            output = self._job.outputs[number]
            text = self.prompt_text(number) + text
            entries = [*(output.prompt_logprobs or [None]), *entries]
            tokens = [*output.prompt_token_ids, *tokens]
        content = b""
        if self._plan is not None:
            pieces = self._split(delta.index, text, ended=reason is not None)
            text = pieces.content
            if pieces.calls or pieces.reasoning:
                told: dict[str, Any] = {"content": text} if text else {}
                if pieces.reasoning:
                    told |= {"reasoning_content": pieces.reasoning, "reasoning": pieces.reasoning}
                if pieces.calls:
                    told["tool_calls"] = pieces.calls
                content = b'"delta":' + encode_json(told)
            if self._parsers[delta.index].num_calls:
                reason = _reason(reason)
        if not (text or content or entries or reason):
            return b""
        logprobs = b"null"
        if entries is not None and tokens:
            logprobs = encode_json(self._writer(delta.index).take(tokens, entries))
        if content:
            pass
        elif not self._request.chat:
            content = b'"text":' + encode_json(text)
        elif text:
            content = b'"delta":{"content":' + encode_json(text) + b"}"
        else:
            content = b'"delta":{}'
        return self._event(delta.index, content, logprobs, reason)

    def _event(self, index: int, content: bytes, logprobs: bytes, reason: str | None) -> bytes:
        told = b"null" if reason is None else encode_json(reason)
        return b"%b%d,%b,\"logprobs\":%b,\"finish_reason\":%b}]%b}\n\n" % (
            self._prefix, index, content, logprobs, told, self._usage,
        )  # fmt: skip

    def endings(self) -> Iterator[bytes]:
        """Events that end the choices of a request for its prompts alone."""
        for index in range(len(self._job.prompts) * self._request.params.n):
            yield self._event(index, b'"text":""', b"null", "length")

    def closing(self) -> bytes:
        """The event with the usage, if it was asked for, and the end."""
        if not self._request.include_usage:
            return DONE
        return event(encode_json({**self._head(), "choices": [], "usage": usage(self._job)})) + DONE


def _reason(reason: str | None) -> str | None:
    """Why a choice with calls ended."""
    return "tool_calls" if reason == "stop" else reason
