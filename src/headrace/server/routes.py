"""The routes beside generation: models, text and tokens, health, metrics, the ledger."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from urllib.parse import parse_qs

import msgspec

from headrace import __version__
from headrace.core.request import RequestError
from headrace.frontend.engine_client import EngineGoneError
from headrace.frontend.input import InputProcessor
from headrace.frontend.openai_request import CHAT, COMPLETIONS, BodyError, parse_body
from headrace.server.errors import ApiError, bad_request, unavailable
from headrace.server.http import Exchange, encode_json, event
from headrace.server.metrics import CONTENT_TYPE
from headrace.server.service import Service

MAX_RECORDS = 1000
ASK_SECONDS = 10.0  # for the engine to answer about its ledger
LIVE_SECONDS = 0.5  # between looks for new step records


async def models(service: Service, exchange: Exchange) -> None:
    entries = [_model(service, name) for name in service.model.names]
    await exchange.answer_json({"object": "list", "data": entries})


async def one_model(service: Service, exchange: Exchange, name: str) -> None:
    service.model.check_name(name)
    await exchange.answer_json(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    info = service.client.info
    return {
        "id": name,
        "object": "model",
        "created": service.model.created,
        "owned_by": "headrace",
        "max_model_len": None if info is None else info.max_model_len,
    }


async def tokenize(service: Service, exchange: Exchange) -> None:
    """{"prompt"} or {"messages"} with the template's fields -> {"count", "max_model_len", "tokens"}."""
    value, size = await exchange.json(service.args.max_body, service.args.body_timeout)
    given = {name: each for name, each in value.items() if each is not None and name != "return_token_strs"}
    strings = value.get("return_token_strs")
    if not isinstance(strings, bool | None):
        raise bad_request("return_token_strs must be true or false", "return_token_strs")
    chat = "messages" in given
    allowed = (
        {"model", "messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
        if chat
        else {"model", "prompt", "add_special_tokens"}
    )
    if not chat and not isinstance(given.get("prompt"), str):
        raise bad_request("prompt must be a string; or give messages", "prompt")
    try:
        body = parse_body(
            CHAT if chat else COMPLETIONS,
            {name: each for name, each in given.items() if name in allowed},
            service.model.defaults,
        )
    except BodyError as error:
        raise bad_request(str(error), error.param) from None
    service.model.check_name(body.model)
    if body.messages is not None:
        prompt = await service.model.render(body.messages, body.template, size)
    else:
        (prompt,) = await service.model.tokens(body.prompts, body.add_special)
    info = service.client.info
    answer: dict[str, Any] = {
        "count": len(prompt.token_ids),
        "max_model_len": None if info is None else info.max_model_len,
        "tokens": prompt.token_ids,
    }
    if strings:
        token_bytes = service.model.tokenizer.token_bytes
        answer["token_strs"] = [token_bytes(token).decode("utf-8", "replace") for token in prompt.token_ids]
    await exchange.answer_json(answer)


async def detokenize(service: Service, exchange: Exchange) -> None:
    """{"tokens"} -> {"prompt"}; special tokens are written out unless skip_special_tokens is true."""
    value, _ = await exchange.json(service.args.max_body, service.args.body_timeout)
    tokens, skip = value.get("tokens"), value.get("skip_special_tokens", False)
    model = value.get("model")
    if model is not None and not isinstance(model, str):
        raise bad_request("model must be a string", "model")
    service.model.check_name(model)
    if not isinstance(tokens, list):
        raise bad_request("tokens must be a list of token ids", "tokens")
    if not isinstance(skip, bool):
        raise bad_request("skip_special_tokens must be true or false", "skip_special_tokens")
    try:
        InputProcessor(service.model.tokenizer, service.model.spec, 1).tokens(tokens)
    except RequestError as error:
        raise bad_request(str(error), "tokens") from None
    await exchange.answer_json({"prompt": await service.model.decode(tokens, skip)})


async def health(service: Service, exchange: Exchange) -> None:
    """200 when the engine answers between two steps; 503 while it loads, when it is gone or does not answer."""
    try:
        await service.client.ask("ping", seconds=service.args.health_timeout)
    except EngineGoneError as error:
        raise unavailable(str(error)) from None
    stats = service.client.stats
    await exchange.answer_json(
        {"status": "ok", "running": stats.running, "waiting": stats.waiting, "engine_pid": service.client.pid}
    )


async def ready(service: Service, exchange: Exchange) -> None:
    """200 when a new request would be taken."""
    info = service.check_open()
    if service.client.num_alive >= info.max_num_seqs + service.args.max_queue:
        raise unavailable("the queue is full", 1)
    await exchange.answer_json({"status": "ready"})


async def version(service: Service, exchange: Exchange) -> None:
    await exchange.answer_json({"version": __version__})


async def metrics(service: Service, exchange: Exchange) -> None:
    await exchange.answer(service.metrics.render(), CONTENT_TYPE)


async def ledger(service: Service, exchange: Exchange) -> None:
    """The latest step records, one JSON object a line (?last=N, 100 of them unless said); to a client that accepts
    text/event-stream, those and every one that follows, as events. With API keys, requests of others are not named."""
    last = _count(exchange, "last", 100)
    if "text/event-stream" not in exchange.headers.get("accept", ""):
        records = await _records(service, -1, last)
        lines = [_seen_by(service, record, exchange.caller) + b"\n" for record in records]
        await exchange.answer(b"".join(lines), "application/x-ndjson")
        return
    gone = asyncio.Event()
    exchange.watch(gone.set)
    seen = -1
    records = await _records(service, seen, last)
    await exchange.start_events()
    while not gone.is_set() and not service.draining:
        if records:
            seen = int(msgspec.json.decode(records[-1])["step_id"])
        told = [event(_seen_by(service, record, exchange.caller)) for record in records]
        await exchange.write(b"".join(told) or b": nothing new\n\n")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIVE_SECONDS):
                await gone.wait()
        records = await _records(service, seen, MAX_RECORDS)
    await exchange.finish()


async def _records(service: Service, after: int, last: int) -> list[bytes]:
    try:
        return (await service.client.ask("ledger", f"{after} {last}", seconds=ASK_SECONDS)).splitlines()
    except EngineGoneError as error:
        raise unavailable(str(error)) from None


def _seen_by(service: Service, line: bytes, caller: str | None) -> bytes:
    """A step record without the requests of other API keys."""
    if caller is None:
        return line
    record = msgspec.json.decode(line)
    may_see = service.owners.may_see
    record["prefixes"] = [use for use in record["prefixes"] if may_see(use["request_id"], caller)]
    record["preempted"] = [name for name in record["preempted"] if may_see(name, caller)]
    record["refusals"] = []  # sentences that name requests
    return encode_json(record)


def _count(exchange: Exchange, name: str, default: int) -> int:
    try:
        query = parse_qs(exchange.query.decode("ascii"), keep_blank_values=True, max_num_fields=16)
        given = query.get(name, [str(default)])[-1]
        count = int(given) if given.isascii() and given.isdigit() and len(given) < 10 else 0
    except ValueError:
        count = 0
    if not 1 <= count <= MAX_RECORDS:
        raise bad_request(f"{name} must be a number between 1 and {MAX_RECORDS}", name)
    return count


async def bill(service: Service, exchange: Exchange, request_id: str, caller: str | None) -> None:
    """Where a request's time went, by the id in its answer; with API keys, to who sent it."""
    if not service.owners.may_see(request_id, caller):
        raise ApiError(404, f"no bill of request {request_id[:100]!r} is kept for this key", code="unknown_request")
    try:
        line = await service.client.ask("bill", request_id, seconds=ASK_SECONDS)
    except EngineGoneError as error:
        raise unavailable(str(error)) from None
    if not line:
        raise ApiError(404, f"no bill of request {request_id[:100]!r} is kept", code="unknown_request")
    await exchange.answer(line)
