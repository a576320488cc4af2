"""From a body to its answer, for every endpoint that generates; /v1/completions and /v1/chat/completions themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.frontend.openai_request import CHAT, COMPLETIONS
from headrace.frontend.tokenizer import Tokenizer
from headrace.server.conversation import effort_variables, prepared_messages
from headrace.server.endpoint import AnswerShape, Endpoint, Translated
from headrace.server.errors import ApiError, bad_request
from headrace.server.http import Exchange
from headrace.server.job import Job, PromptTokens
from headrace.server.protocol import ApiRequest, parse_request
from headrace.server.service import Service
from headrace.server.shapes import Shape

STATUS_WAIT = 1.0  # seconds that a stream's status line waits for its first token, so that early errors have their own
GRAMMAR_WAIT = 10.0  # the same where a grammar may have to be compiled first
IGNORED = "x-headrace-ignored"


@dataclass
class Told:
    """What is known of a request for its line in the log."""

    outcome: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chats(Endpoint):
    route, url, prefix = "chat", CHAT, "chatcmpl-"

    def shape(self, job: Job, model: str, tokenizer: Tokenizer, notes: Mapping[str, Any]) -> Shape:
        return Shape(job, model, tokenizer)


class _Texts(_Chats):
    route, url, prefix = "completions", COMPLETIONS, "cmpl-"


CHATS, TEXTS = _Chats(), _Texts()


async def generate(
    service: Service, exchange: Exchange, endpoint: Endpoint, caller: str | None, job_id: str, told: Told
) -> None:
    """Answer a body sent to an endpoint. Raises ApiError and ClientGoneError; what was begun is ended either way."""
    arrived = time.monotonic()
    service.check_open()
    value, size = await exchange.json(service.args.max_body, service.args.body_timeout)
    try:
        translated = endpoint.translate(service, value, caller)
        request, model = _check(service, endpoint.url, translated, exchange)
        request = service.isolated(request, caller)
        prompts = await _prompts(service, request, max(size, translated.size))
        if request.chat:
            request = _planned(service, request, prompts[0])
    except ApiError as error:
        raise endpoint.in_own_words(error) from None
    told.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    if request.no_output and request.params.logprobs is None:
        job = service.echo(job_id, request, prompts, arrived)
        await _echo(exchange, Shape(job, model, service.model.tokenizer), request.body.stream)
        told.outcome = "length"
        return
    job = service.submit(job_id, request, prompts, arrived, keep=request.body.stream)
    exchange.watch(job.abandon)
    try:
        shape = endpoint.shape(job, model, service.model.tokenizer, translated.notes)
        if request.body.stream:
            await _stream(exchange, job, shape, lambda: endpoint.finished(service, shape, caller))
        else:
            await job.finished()
            data = shape.body()
            endpoint.finished(service, shape, caller)
            await exchange.answer(data)
    finally:
        job.abandon()  # does nothing to a job that has ended
        service.done(job)
        told.outcome, told.completion_tokens = job.outcome, job.completion_tokens


async def count_tokens(service: Service, exchange: Exchange, endpoint: Endpoint, caller: str | None) -> None:
    """How many tokens the prompt of a body has."""
    value, size = await exchange.json(service.args.max_body, service.args.body_timeout)
    try:
        translated = endpoint.translate(service, value, caller)
        request, _ = _check(service, endpoint.url, translated, exchange)
        (prompt,) = await _prompts(service, request, size, limited=False)
    except ApiError as error:
        raise endpoint.in_own_words(error) from None
    await exchange.answer_json({"input_tokens": len(prompt.token_ids)})


def _check(service: Service, url: str, translated: Translated, exchange: Exchange) -> tuple[ApiRequest, str]:
    request = parse_request(url, translated.body, service.model.defaults)
    if request.tools is not None and service.model.form.tools is None:
        raise bad_request(
            "this model's chat template has no form of tool calls that is known; leave tools out", "tools"
        )
    ignored = [*translated.ignored, *request.ignored]
    if effort_variables(request.reasoning_effort, service.model.template.sources) is None:
        ignored.append("reasoning_effort")
    if ignored:
        exchange.extra_headers[IGNORED] = ", ".join(map(_in_header, ignored[:16]))
    return request, service.model.check_name(request.body.model)


def _in_header(name: str) -> str:
    """A field's name as a part of a header's value, which may hold neither everything nor nothing."""
    return "".join(c if "!" <= c <= "~" else "?" for c in name[:64]) or "?"


async def _prompts(service: Service, request: ApiRequest, size: int, limited: bool = True) -> list[PromptTokens]:
    body = request.body
    if body.messages is not None:
        sources = service.model.template.sources
        template = {**(effort_variables(request.reasoning_effort, sources) or {}), **body.template}
        if request.tools is not None:
            template["tools"] = request.tools.definitions
        messages = prepared_messages(body.messages, sources)
        prompts = [await service.model.render(messages, template, size)]
    else:
        prompts = await service.model.tokens(body.prompts, body.add_special)
    engineless = request.no_output and request.params.logprobs is None
    for prompt in prompts if limited else ():
        service.check_prompt(prompt, "messages" if request.chat else "prompt", 0 if engineless else 1)
    return prompts


def _planned(service: Service, request: ApiRequest, prompt: PromptTokens) -> ApiRequest:
    """With how the answers are read and what they are held to, now that it is known how the prompt ends."""
    form, body = service.model.form, request.body
    continued = body.template.get("continue_final_message") is True
    plan = form.plan(request.tools, prompt.rendered, continued, body.params.skip_special_tokens)
    params = form.params(body.params, plan)
    prompt.rendered = ""
    return replace(request, plan=plan, kept=form.kept_ids(request.tools), body=replace(body, params=params))


async def _stream(exchange: Exchange, job: Job, shape: AnswerShape, finished: Callable[[], None]) -> None:
    await job.settled(STATUS_WAIT if job.request.params.grammar is None else GRAMMAR_WAIT)
    await exchange.start_events()
    exchange.errors = shape.errors or exchange.errors
    begun: set[int] = set()
    parts = list(shape.opening())
    try:
        while deltas := await job.deltas():
            for delta in deltas:
                parts.append(shape.chunk(delta, delta.index not in begun))
                begun.add(delta.index)
            data = b"".join(parts)
            parts.clear()
            if data:
                await exchange.write(data)
    except ApiError:
        if parts:
            await exchange.write(b"".join(parts))
        raise
    end = shape.closing()
    finished()
    await exchange.finish(end)


async def _echo(exchange: Exchange, shape: Shape, stream: bool) -> None:
    """The prompts alone: nothing is for the engine to do."""
    if not stream:
        await exchange.answer(shape.body())
        return
    await exchange.start_events()
    await exchange.finish(b"".join([*shape.opening(), *shape.endings(), shape.closing()]))
