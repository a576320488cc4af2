"""The ASGI application: who may call what, and what becomes of errors."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable

from headrace.frontend.openai_request import CHAT, COMPLETIONS
from headrace.server import routes
from headrace.server.access import Keys, Origins
from headrace.server.anthropic.endpoint import COUNT, COUNT_PATH, MESSAGES
from headrace.server.anthropic.endpoint import PATH as MESSAGES_PATH
from headrace.server.endpoint import Endpoint
from headrace.server.errors import ApiError
from headrace.server.generate import CHATS, TEXTS, Told, count_tokens, generate
from headrace.server.http import ClientGoneError, Exchange, Receive, Scope, Send
from headrace.server.openapi.document import PATH as OPENAPI_PATH
from headrace.server.openapi.document import openapi
from headrace.server.page import is_page, page
from headrace.server.responses.endpoint import PATH as RESPONSES_PATH
from headrace.server.responses.endpoint import RESPONSES
from headrace.server.service import Service

logger = logging.getLogger("headrace.server")
Handler = Callable[[Service, Exchange], Awaitable[None]]
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_GENERATION: dict[str, Endpoint] = {
    CHAT: CHATS,
    COMPLETIONS: TEXTS,
    RESPONSES_PATH: RESPONSES,
    MESSAGES_PATH: MESSAGES,
}
_ROUTES: dict[str, tuple[str, Handler]] = {
    "/v1/models": ("GET", routes.models),
    "/tokenize": ("POST", routes.tokenize),
    "/detokenize": ("POST", routes.detokenize),
    "/health": ("GET", routes.health),
    "/ready": ("GET", routes.ready),
    "/version": ("GET", routes.version),
    "/metrics": ("GET", routes.metrics),
    "/ledger": ("GET", routes.ledger),
    OPENAPI_PATH: ("GET", openapi),
}
_RESPONSE = re.compile(RESPONSES_PATH + r"/([^/]+)")
_MODEL, _BILL = re.compile(r"/v1/models/(.+)"), re.compile(r"/requests/([^/]+)/bill")


class App:
    """Called by the HTTP server once a request."""

    def __init__(self, service: Service):
        self._service = service
        self._keys = Keys(service.args.api_keys())
        self._origins = Origins(service.args.cors_origin)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        started = time.monotonic()
        url, told = exchange.path, Told()
        endpoint = _GENERATION.get(url)
        own_id = uuid.uuid4().hex if endpoint is None else endpoint.new_id()
        if endpoint is not None or url == COUNT_PATH:
            exchange.errors = (endpoint or COUNT).errors
        given = exchange.headers.get("x-request-id", "")
        exchange.extra_headers["x-request-id"] = given if _REQUEST_ID.fullmatch(given) else own_id
        exchange.extra_headers |= self._origins.headers(exchange)
        try:
            try:
                await self._route(exchange, own_id, told)
            except ApiError as error:
                told.outcome = told.outcome or ("rejected" if error.status < 500 else "error")
                await exchange.fail(error)
            except ClientGoneError:
                told.outcome = "aborted"
            except Exception as error:
                logger.exception("%s %s failed", exchange.method, url)
                told.outcome = "error"
                await exchange.fail(ApiError(500, f"internal error: {type(error).__name__}"))
        except OSError:  # the client went while it was being answered
            told.outcome = "aborted"
        finally:
            exchange.close()
            self._tell(exchange, own_id, told, time.monotonic() - started)

    async def _route(self, exchange: Exchange, own_id: str, told: Told) -> None:
        preflight = self._origins.preflight(exchange)
        if preflight is not None:
            await exchange.answer(b"", "text/plain", 204, preflight)
            return
        if is_page(exchange.path):
            _check_method(exchange, "GET")
            await page(exchange)
            return
        caller = exchange.caller = self._keys.check(exchange)
        service, path = self._service, exchange.path
        if path in _GENERATION:
            _check_method(exchange, "POST")
            await generate(service, exchange, _GENERATION[path], caller, own_id, told)
        elif path == COUNT_PATH:
            _check_method(exchange, "POST")
            await count_tokens(service, exchange, COUNT, caller)
        elif path in _ROUTES:
            method, handler = _ROUTES[path]
            _check_method(exchange, method)
            await handler(service, exchange)
        elif match := _MODEL.fullmatch(path):
            _check_method(exchange, "GET")
            await routes.one_model(service, exchange, match[1])
        elif match := _RESPONSE.fullmatch(path):
            if exchange.method != "DELETE":
                _check_method(exchange, "GET")
            await RESPONSES.stored(service, exchange, match[1], caller)
        elif match := _BILL.fullmatch(path):
            _check_method(exchange, "GET")
            await routes.bill(service, exchange, match[1], caller)
        else:
            raise ApiError(404, f"there is nothing at {path[:200]}", code="unknown_url")

    def _tell(self, exchange: Exchange, own_id: str, told: Told, seconds: float) -> None:
        metrics, endpoint = self._service.metrics, _GENERATION.get(exchange.path)
        if exchange.status:
            metrics.responses.labels(str(exchange.status)).inc()
        if endpoint is None:
            return
        metrics.requests.labels(endpoint.route, told.outcome or "error").inc()
        if self._service.args.log_requests:
            logger.info(
                "%s %s %s %s prompt=%d generated=%d %.3fs",
                own_id, endpoint.route, exchange.status or "-", told.outcome, told.prompt_tokens,
                told.completion_tokens, seconds,
            )  # fmt: skip


def _check_method(exchange: Exchange, method: str) -> None:
    if exchange.method != method and not (method == "GET" and exchange.method == "HEAD"):
        raise ApiError(405, f"{exchange.path} takes {method}", headers={"allow": method})
