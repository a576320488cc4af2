"""Errors as OpenAI's API shapes them: {"error": {"message", "type", "param", "code"}} with the status that fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer other than 200. `param` names the field at fault, `extra` goes beside the message."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {
            "error": {
                "message": self.message, "type": kind, "param": self.param, "code": self.code or None, **self.extra,
            }
        }  # fmt: skip


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def unavailable(message: str, retry_after: int = 5) -> ApiError:
    return ApiError(503, message, headers={"retry-after": str(retry_after)})
