"""Options of `headrace serve` besides the engine's. The command line is generated from them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.config import ConfigError, option

KEYS_VARIABLE = "HEADRACE_API_KEYS"
MAX_KEYS = 10_000


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """Seconds may be fractions; sizes are bytes."""

    host: str = option("127.0.0.1", "address to listen at; 0.0.0.0 is every one of this machine")
    port: int = option(8000, "port to listen at; 0 takes a free one and says which")
    served_model_name: tuple[str, ...] = option((), "name of the model in the API; repeat for several")
    chat_template: str | None = option(None, "file of a chat template to use instead of the model's own")
    api_key_file: str | None = option(
        None, f"file of API keys, one a line; those in ${KEYS_VARIABLE} (commas between) count too"
    )
    cors_origin: tuple[str, ...] = option((), "origin whose pages may call the API, or *; repeat for several")
    max_stored: int = option(
        1000, "most answers of /v1/responses kept for previous_response_id (64 MB at most); 0: none"
    )
    max_queue: int = option(1024, "most choices that wait besides those that can run; more are answered 429")
    max_per_key: int = option(0, "most choices of one API key at once; more are answered 429; 0: any")
    max_body: int = option(8 * 2**20, "largest body, in bytes")
    request_timeout: float = option(0.0, "most seconds a request may take, waiting included; 0: any")
    body_timeout: float = option(30.0, "seconds in which a request's head and body must arrive")
    write_timeout: float = option(30.0, "seconds in which a client must take what was sent, or it is cut off")
    health_timeout: float = option(5.0, "seconds in which the engine must answer for /health")
    drain_timeout: float = option(30.0, "seconds that running requests get to finish after SIGTERM")
    on_engine_death: Literal["exit", "restart"] = option("exit", "what to do when the engine process dies")
    log_requests: bool = option(True, "one line for each request on stderr, never any of its text")

    def __post_init__(self) -> None:
        if not self.host:  # the system would take it for every address
            raise ConfigError("host must not be empty; 127.0.0.1 is this machine alone, 0.0.0.0 every address of it")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, not {self.port}")
        for name in ("max_stored", "max_queue", "max_per_key", "request_timeout"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be below 0")
        for name in ("max_body", "body_timeout", "write_timeout", "health_timeout", "drain_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0")

    def api_keys(self) -> tuple[str, ...]:
        """Keys from the file and the environment; none: everybody may call. ConfigError if they are unusable."""
        found: list[str] = os.environ.get(KEYS_VARIABLE, "").split(",")
        if self.api_key_file is not None:
            try:
                lines = Path(self.api_key_file).read_text("utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"api_key_file {self.api_key_file} cannot be read: {error}") from None
            found += [line for line in lines if not line.lstrip().startswith("#")]
        keys = tuple(dict.fromkeys(key.strip() for key in found if key.strip()))
        _check_keys(keys)
        if self.api_key_file is not None and not keys:
            raise ConfigError(f"api_key_file {self.api_key_file} holds no key")
        return keys

    def template_source(self) -> str | None:
        if self.chat_template is None:
            return None
        try:
            return Path(self.chat_template).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template {self.chat_template} cannot be read: {error}") from None


def _check_keys(keys: Iterable[str]) -> None:
    for count, key in enumerate(keys, 1):
        if not key.isascii() or any(character.isspace() for character in key):
            raise ConfigError("an API key must be ASCII without spaces")
        if count > MAX_KEYS:
            raise ConfigError(f"at most {MAX_KEYS} API keys are taken")
