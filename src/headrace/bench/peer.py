"""A peer's process, and how to speak with it (peer_script.py says what)."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from headrace.bench.measure import Timing

SCRIPT = Path(__file__).with_name("peer_script.py")
KINDS = ("transformers", "llama.cpp", "openvino")


class PeerError(ValueError):
    """A peer that cannot be started, died, or could not do its work; the message holds what it said."""


class Peer:
    """One persistent process. Use as a context manager.

    `kind` is one of `KINDS`, or the path of a script that speaks the protocol; `python` runs it, isolated from this
    environment. `seconds` is the longest that one answer may take. `environment`: variables of the process, which the
    Python of KINDS does not heed where they are its own (PYTHON...); None: this process's.
    """

    def __init__(
        self,
        kind: str,
        python: str = sys.executable,
        seconds: float = 1200.0,
        environment: Mapping[str, str] | None = None,
    ):
        self.kind = kind
        self.name = kind  # with the version, once loaded
        self._seconds = seconds
        if kind in KINDS:
            command = [python, "-I", str(SCRIPT), kind]
        elif kind.endswith(".py") and Path(kind).is_file():
            command = [python, kind]
        else:
            raise PeerError(f"unknown peer {kind!r}: one of {', '.join(KINDS)}, or a script that ends in .py")
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                encoding="utf-8",
                env=environment,
            )
        except OSError as error:
            self._said.close()
            raise PeerError(f"{kind}: cannot run {python}: {error.strerror or error}") from None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name=f"peer-{kind}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def load(self, model: str | Path, dtype: str, threads: int) -> None:
        """Load a model; afterwards `name` tells the peer's version."""
        answer = self._ask({"op": "load", "model": str(model), "dtype": dtype, "threads": threads})
        if not isinstance(answer.get("name"), str):
            raise PeerError(f"{self.kind} answered {answer!r}, which holds no name")
        self.name = answer["name"]

    def run(self, prompts: Sequence[list[int]], num_tokens: int) -> Timing:
        """Generate `num_tokens` greedy tokens for each of some equally long prompts."""
        answer = self._ask({"op": "run", "prompts": list(prompts), "num_tokens": num_tokens})
        try:
            started, by_then = float(answer["first_token"]), int(answer.get("tokens_by_then", len(prompts)))
            timing = Timing(started, started, by_then, float(answer["total"]), int(answer["num_tokens"]))
        except (KeyError, TypeError, ValueError):
            raise PeerError(f"{self.name} answered {answer!r}, which is no timing") from None
        wanted = len(prompts) * num_tokens
        if timing.num_tokens != wanted or not 0 < timing.first_token <= timing.total:
            raise PeerError(f"{self.name} did other work than asked: {answer!r} for {wanted} tokens")
        return timing

    def close(self) -> None:
        """End the process. Calling it again does nothing."""
        if self._process.poll() is None:
            try:
                self._send({"op": "quit"})
                self._process.wait(timeout=5)
            except (PeerError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self) -> None:
        """Pass on what the process says, and "" at its end."""
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._answers.put(line)
        except ValueError:  # closed while reading
            pass
        self._answers.put("")

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise PeerError(self._obituary()) from None

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._send(request)
        try:
            line = self._answers.get(timeout=self._seconds)
        except queue.Empty:
            self._process.kill()
            raise PeerError(f"{self.name} did not answer within {self._seconds:g} s") from None
        if not line:
            raise PeerError(self._obituary())
        try:
            answer = json.loads(line)
        except ValueError:
            raise PeerError(f"{self.name} answered {line[:200]!r}, which is not JSON") from None
        if not isinstance(answer, dict) or answer.get("ok") is not True:
            told = answer.get("error") if isinstance(answer, dict) else line[:200]
            raise PeerError(f"{self.name}: {told}")
        return answer

    def _obituary(self) -> str:
        """How it died, with the last line that it printed."""
        try:
            code: int | str = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = "unknown"
        self._said.seek(0)
        lines = self._said.read()[-4096:].decode("utf-8", "replace").strip().splitlines()
        return f"{self.name} ended with exit code {code}" + (f": {lines[-1]}" if lines else "")
