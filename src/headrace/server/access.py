"""Who may call: API keys, and origins of web pages (CORS)."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from headrace.server.errors import ApiError
from headrace.server.http import Exchange

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})  # for probes; they tell nothing of any text


class Keys:
    """The API keys; with none, everybody may call."""

    def __init__(self, keys: Sequence[str]):
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, exchange: Exchange) -> str | None:
        """A name for the caller that tells nothing of the key, or None where there are no keys. ApiError 401."""
        if not self._digests or exchange.path in OPEN_PATHS:
            return None
        scheme, _, given = exchange.headers.get("authorization", "").partition(" ")
        if "x-api-key" in exchange.headers and not given:  # Anthropic's clients
            scheme, given = "bearer", exchange.headers["x-api-key"]
        if scheme.lower() != "bearer" or not given.strip():
            raise _refused("give an API key: Authorization: Bearer KEY")
        digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for own in self._digests:  # every one is compared, in constant time: how long it takes tells nothing
            if hmac.compare_digest(own, digest):
                found = own
        if found is None:
            raise _refused("this API key is not known")
        return found.hex()[:16]


def _refused(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


class Origins:
    """Origins whose pages may call."""

    def __init__(self, origins: Sequence[str]):
        self._origins = frozenset(origin.rstrip("/") for origin in origins)

    def headers(self, exchange: Exchange) -> dict[str, str]:
        """What to tell the browser with every answer; nothing to origins that may not call."""
        origin = exchange.headers.get("origin")
        if origin is None or not self._origins:
            return {}
        if "*" in self._origins:
            allowed = "*"
        elif origin in self._origins:
            allowed = origin
        else:
            return {"vary": "origin"}
        return {
            "access-control-allow-origin": allowed,
            "access-control-expose-headers": "x-request-id, x-headrace-ignored, retry-after",
            "vary": "origin",
        }

    def preflight(self, exchange: Exchange) -> dict[str, str] | None:
        """Headers of the answer to a browser's question before a call; None if the exchange is no such question."""
        if exchange.method != "OPTIONS" or "access-control-request-method" not in exchange.headers:
            return None
        return {
            "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
            "access-control-allow-headers": exchange.headers.get("access-control-request-headers", "*")[:1000],
            "access-control-max-age": "600",
        }
