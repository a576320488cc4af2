"""The OpenAPI document of this server, at /openapi.json: what every route takes and answers.

Bodies may hold fields beyond those that are described: they are ignored, and named in a header of the answer. Some
combinations of fields are refused with status 400 although each is right alone.
"""

from __future__ import annotations

from typing import Any

from headrace import __version__
from headrace.server.http import Exchange
from headrace.server.openapi import bodies
from headrace.server.openapi.parts import (
    BOOLEAN,
    COMPONENTS,
    COUNT,
    OBJECT,
    STRING,
    Schema,
    answer,
    integer,
    listed,
    one_of,
    or_null,
    ref,
    string,
)
from headrace.server.service import Service

PATH = "/openapi.json"
_REFUSALS = {
    "400": "a field is wrong; error.param names it", "401": "the API key is missing or unknown",
    "404": "there is no such model or answer", "408": "the body did not arrive in time", "413": "the body is too large",
    "415": "the body is not JSON", "429": "the queue is full, or too much is asked for at once",
    "500": "the engine failed", "503": "loading, draining, or the engine is gone", "504": "the request took too long",
}  # fmt: skip
_FINISH = or_null(one_of("stop", "length", "tool_calls"))


def document(names: tuple[str, ...], *, keys: bool) -> dict[str, Any]:
    """For a server of a model with these names; `keys`: it wants API keys."""
    model: Schema = {"enum": list(names)}
    model_object = answer({"id": STRING, "object": one_of("model"), "created": COUNT, "owned_by": STRING})
    generated = {"description": "x-headrace-ignored names the fields that were ignored"}
    paths: dict[str, Any] = {
        "/v1/chat/completions": {"post": _post("Answer a chat", bodies.chat(model), _chat_answer(), events=True)},
        "/v1/completions": {"post": _post("Go on with a text", bodies.completions(model), _text_answer(), events=True)},
        "/v1/responses": {"post": _post("Answer items", bodies.responses(model), _response(), events=True)},
        "/v1/responses/{response_id}": {
            "get": _get("An answer that was stored", _response(), path="response_id", missing=True),
            "delete": _get("Forget it", answer({"id": STRING, "deleted": BOOLEAN}), path="response_id", missing=True),
        },
        "/v1/messages": {
            "post": _post(
                "Answer a chat, Anthropic's way",
                bodies.messages(model),
                _message(),
                events=True,
                error="AnthropicError",
            )
        },
        "/v1/messages/count_tokens": {
            "post": _post(
                "Tokens of a prompt",
                bodies.messages(model, counting=True),
                answer({"input_tokens": COUNT}),
                error="AnthropicError",
            )
        },
        "/v1/models": {"get": _get("What is served", answer({"object": one_of("list"), "data": listed(model_object)}))},
        "/v1/models/{name}": {"get": _get("A model", model_object, path="name", missing=True)},
        "/tokenize": {
            "post": _post("Text to tokens", bodies.tokenize(model), answer({"count": COUNT, "tokens": listed(COUNT)}))
        },
        "/detokenize": {"post": _post("Tokens to text", bodies.detokenize(model), answer({"prompt": STRING}))},
        "/health": {"get": _get("Whether the engine answers", answer({"status": STRING}))},
        "/ready": {"get": _get("Whether a new request would be taken", answer({"status": STRING}))},
        "/version": {"get": _get("The version", answer({"version": STRING}))},
        "/metrics": {"get": _get("Prometheus metrics", STRING, kind="text/plain")},
        "/ledger": {"get": _get("Step records", STRING, kind="application/x-ndjson", query={"last": integer(1, 1000)})},
        "/requests/{request_id}/bill": {
            "get": _get("Where a request's time went", OBJECT, path="request_id", missing=True)
        },
        PATH: {"get": _get("This document", OBJECT)},
    }
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        paths[path]["post"] |= generated
    components: dict[str, Any] = {"schemas": COMPONENTS}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": components,
    }
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


async def openapi(service: Service, exchange: Exchange) -> None:
    await exchange.answer_json(document(service.model.names, keys=bool(service.args.api_keys())))


def _refusals(error: str, *statuses: str) -> dict[str, Any]:
    content = {"application/json": {"schema": ref(error)}}
    return {status: {"description": _REFUSALS[status], "content": content} for status in statuses}


def _post(summary: str, body: Schema, result: Schema, *, events: bool = False, error: str = "Error") -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": result}}
    if events:
        content["text/event-stream"] = {"schema": {}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "done", "content": content}, **_refusals(error, *_REFUSALS)},
    }


def _get(
    summary: str,
    result: Schema,
    *,
    kind: str = "application/json",
    path: str | None = None,
    query: dict[str, Schema] | None = None,
    missing: bool = False,
) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = []
    if path is not None:
        parameters.append({"name": path, "in": "path", "required": True, "schema": string(1)})
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in (query or {}).items()]
    statuses = ["401", "503", *(["404"] if missing else []), *(["400"] if query else [])]
    return {
        "summary": summary,
        "parameters": parameters,
        "responses": {
            "200": {"description": "done", "content": {kind: {"schema": result}}},
            **_refusals("Error", *sorted(statuses)),
        },
    }


# -- answers


def _envelope(kind: str, choice: dict[str, Schema]) -> Schema:
    choices = listed(answer({"index": COUNT, "finish_reason": _FINISH, **choice}))
    head = {"id": STRING, "object": one_of(kind), "created": COUNT, "model": STRING}
    return answer({**head, "choices": choices, "usage": ref("Usage")})


def _chat_answer() -> Schema:
    message = answer(
        {"role": one_of("assistant"), "content": or_null(STRING)},
        {"tool_calls": listed(ref("Call"), least=1), "reasoning": STRING, "reasoning_content": STRING},
    )
    logprobs = or_null(answer({"content": listed(ref("Logprob"))}))
    return _envelope("chat.completion", {"message": message, "logprobs": logprobs})


def _text_answer() -> Schema:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    logprobs = or_null(answer({name: listed({}) for name in names}))
    return _envelope("text_completion", {"text": STRING, "logprobs": logprobs})


def _response() -> Schema:
    item = answer({"id": STRING, "type": one_of("message", "reasoning", "function_call"), "status": STRING})
    usage = answer({"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT})
    return answer(
        {
            "id": STRING, "object": one_of("response"), "created_at": COUNT, "model": STRING, "output": listed(item),
            "status": one_of("completed", "incomplete"), "usage": usage,
        }
    )  # fmt: skip


def _message() -> Schema:
    block = answer({"type": one_of("text", "thinking", "tool_use")})
    reason = one_of("end_turn", "max_tokens", "stop_sequence", "tool_use")
    usage = answer({"input_tokens": COUNT, "output_tokens": COUNT, "cache_read_input_tokens": COUNT})
    return answer(
        {
            "id": STRING, "type": one_of("message"), "role": one_of("assistant"), "model": STRING,
            "content": listed(block), "stop_reason": reason, "stop_sequence": or_null(STRING), "usage": usage,
        }
    )  # fmt: skip
