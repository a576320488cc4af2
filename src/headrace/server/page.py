"""The web page at /: files of `server/web`, read once, sent with a policy that lets the page load nothing but itself.

The page calls the API as any client does, with the key that it is given; its files tell nothing and need none.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources

from headrace.server.errors import ApiError
from headrace.server.http import Exchange

PREFIX = "/web/"
_KINDS = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "cache-control": "no-cache",  # the tag says whether it is still the same
}


def is_page(path: str) -> bool:
    """Whether the path belongs to the page."""
    return path == "/" or path.startswith(PREFIX)


@cache
def _files() -> dict[str, tuple[bytes, str, str]]:
    """Path -> content, type and tag of each file there is: no path of a request ever reaches the disk."""
    found = {}
    for file in resources.files("headrace.server").joinpath("web").iterdir():
        kind = _KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            data = file.read_bytes()
            path = "/" if file.name == "index.html" else PREFIX + file.name
            found[path] = data, kind, f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    return found


async def page(exchange: Exchange) -> None:
    """Answer with a file of the page; ApiError 404 if there is none."""
    known = _files().get(exchange.path)
    if known is None:
        raise ApiError(404, f"there is nothing at {exchange.path[:200]}", code="unknown_url")
    data, kind, tag = known
    headers = {**_HEADERS, "etag": tag}
    if exchange.headers.get("if-none-match") == tag:
        await exchange.answer(b"", kind, 304, headers)
    else:
        await exchange.answer(data, kind, headers=headers)
