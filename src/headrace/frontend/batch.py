"""A file of requests in OpenAI's batch form, answered into a file of results.

A line in:  {"custom_id", "method": "POST", "url": "/v1/chat/completions" | "/v1/completions", "body"}
A line out: {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}, in the order of completion.
A body that cannot be served is answered with status 400; a line that is no request has response null and an error
{"code", "message", "line"}. No line stops the batch.

The file of results is only ever appended to, one whole line in one write, so a process that dies leaves at most one
torn line, the last. A new run takes that off, skips what has been answered and goes on: no line is repeated or lost.
Nothing is taken off a file that is not one of ours.
What is in it is answered for good, errors too. It is locked while it is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from headrace.core.request import FinishReason, RequestError
from headrace.frontend.engine import Engine
from headrace.frontend.openai_request import URLS, BodyError, BodyRequest, parse_body
from headrace.frontend.openai_response import error_body, response_body
from headrace.frontend.output import RequestOutput
from headrace.sampling.params import SamplingParams

SYNC_EVERY = 5.0  # seconds between calls of fsync
_BEGINS = b'{"id": "batch_req_'  # every line of results does
_FIELDS = ("custom_id", "method", "url", "body")
Key = str | int  # what tells lines apart: the custom_id, or the line's number where it has none


class BatchError(ValueError):
    """A batch that cannot be run at all: nothing has been written."""


class _LineError(ValueError):
    """A line that is no request."""

    def __init__(self, code: str, message: str, custom_id: str | None = None):
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


@dataclass
class BatchSummary:
    """What a run did."""

    num_lines: int = 0  # in the file, blank ones left out
    num_skipped: int = 0  # answered by earlier runs
    num_done: int = 0  # answered by this one
    num_failed: int = 0  # of them, with an error or a status other than 200
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Every line of the file has been answered."""
        return self.num_skipped + self.num_done == self.num_lines

    def line(self) -> str:
        """One line for people."""
        rate = self.output_tokens / self.seconds if self.seconds > 0 else 0.0
        earlier = f", {self.num_skipped} by earlier runs" if self.num_skipped else ""
        return (
            f"{self.num_done} of {self.num_lines} lines answered{earlier}, {self.num_failed} with errors; "
            f"{self.prompt_tokens} prompt and {self.output_tokens} output tokens in {self.seconds:.1f} s, "
            f"{rate:.1f} output tokens/s"
        )


@dataclass
class _Job:
    """A line being answered."""

    custom_id: str
    request: BodyRequest
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)


def run_batch_file(
    engine: Engine,
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    defaults: SamplingParams,
    *,
    max_in_flight: int,
    progress: Callable[[BatchSummary], None] = lambda summary: None,
) -> BatchSummary:
    """Answer every line of `source` that `target` does not answer yet, with at most `max_in_flight` lines submitted at
    a time. `progress` is told before the first line and after each. Raises BatchError when the files make no sense
    (duplicate ids, results of another batch), OSError when they cannot be used. An exception on the way, Ctrl-C too,
    leaves a `target` that a new run goes on from."""
    source, target = Path(source), Path(target)
    if max_in_flight < 1:
        raise BatchError(f"at least one request must be in flight, not {max_in_flight}")
    check_target(source, target)
    keys = scan_batch(source)
    with _Results(target) as results:
        done = results.restore()
        strangers = done - keys.keys()
        if strangers:
            raise BatchError(f"{target} is of another batch: it answers {min(map(str, strangers))!r}, not in {source}")
        summary = BatchSummary(num_lines=len(keys), num_skipped=len(done))
        progress(summary)
        _Runner(engine, results, defaults, summary, progress).run(_lines(source), done, max_in_flight)
    return summary


def check_target(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """BatchError where `target` is the input itself, or no file that lines can be kept in."""
    target = Path(target)
    if not target.exists():
        return
    if not target.is_file():
        raise BatchError(f"{target} is not a regular file, so no run could go on from it; name another file")
    if Path(source).samefile(target):
        raise BatchError(f"{target} is the input; name another file for the results")


class _Runner:
    """Keeps the engine fed and writes what is done."""

    def __init__(
        self,
        engine: Engine,
        results: _Results,
        defaults: SamplingParams,
        summary: BatchSummary,
        progress: Callable[[BatchSummary], None],
    ):
        self._engine, self._results, self._defaults = engine, results, defaults
        self._summary, self._progress = summary, progress
        self._jobs: dict[str, _Job] = {}  # by custom_id
        self._job_of: dict[int, _Job] = {}  # by the id() of an output
        self._started = time.perf_counter()

    def run(self, lines: Iterator[tuple[int, bytes]], done: set[Key], max_in_flight: int) -> None:
        more = True
        try:
            while more or self._jobs:
                while more and len(self._jobs) < max_in_flight:
                    line = next(lines, None)
                    more = line is not None
                    if line is not None:
                        self._start(*line, done)
                if self._jobs:
                    self._step()
        finally:
            for job in self._jobs.values():
                for output in job.outputs:
                    self._engine.abort(output)

    def _start(self, number: int, line: bytes, done: set[Key]) -> None:
        try:
            custom_id, url, body = _parse_line(line)
            if custom_id in done:
                return
        except _LineError as error:
            if (error.custom_id or number) not in done:
                told = {"code": error.code, "message": str(error), "line": number}
                self._write(error.custom_id, None, told)
            return
        try:
            job = _Job(custom_id, parse_body(url, body, self._defaults))
            if job.request.stream:
                raise BodyError("a batch cannot stream; leave out stream", "stream")
            self._submit(job)
        except BodyError as error:
            self._answer(custom_id, 400, error_body(str(error), param=error.param))
        except (RequestError, ValueError, RecursionError) as error:  # what templates and tokenizers refuse
            self._answer(custom_id, 400, error_body(str(error) or type(error).__name__))
        else:
            self._jobs[custom_id] = job

    def _submit(self, job: _Job) -> None:
        request = job.request
        if request.messages is not None:
            prompts: list[Any] = [self._engine.render(request.messages, **request.template)]
        else:
            prompts = list(request.prompts)
        special = request.add_special and request.messages is None
        try:
            for prompt in prompts:
                output = self._engine.submit(prompt, request.params, add_special=special)
                job.outputs.append(output)
                self._job_of[id(output)] = job
        except BaseException:
            self._drop(job)
            raise

    def _step(self) -> None:
        touched = {id(update.output) for update in self._engine.step()}
        for key in touched:
            job = self._job_of.get(key)
            if job is not None and job.finished:
                del self._jobs[job.custom_id]
                self._finish(job)
                self._drop(job)

    def _drop(self, job: _Job) -> None:
        for output in job.outputs:
            if not output.finished:
                self._engine.abort(output)
            self._job_of.pop(id(output), None)

    def _finish(self, job: _Job) -> None:
        choices = [choice for output in job.outputs for choice in output.outputs]
        wrong = next((c for c in choices if c.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)), None)
        if wrong is not None:
            self._answer(job.custom_id, 500, error_body(wrong.error or "the request was aborted", kind="server_error"))
            return
        engine = self._engine
        response_id = f"cmpl-{job.outputs[0].request_id}"
        body = response_body(
            job.request, job.outputs, engine.tokenizer, model=engine.checkpoint.name, response_id=response_id
        )
        self._summary.prompt_tokens += body["usage"]["prompt_tokens"]
        self._summary.output_tokens += body["usage"]["completion_tokens"]
        self._answer(job.custom_id, 200, body)

    def _answer(self, custom_id: str, status: int, body: dict[str, Any]) -> None:
        self._write(custom_id, {"status_code": status, "request_id": f"req-{custom_id}", "body": body}, None)

    def _write(self, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
        place = custom_id if custom_id is not None else f"line-{(error or {}).get('line')}"
        self._results.write({"id": f"batch_req_{place}", "custom_id": custom_id, "response": response, "error": error})
        summary = self._summary
        summary.num_done += 1
        summary.num_failed += response is None or response["status_code"] != 200
        summary.seconds = time.perf_counter() - self._started
        self._progress(summary)


class _Results:
    """The file of results: restored, locked, appended to."""

    def __init__(self, path: Path):
        self._path = path
        self._file: BinaryIO = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by __exit__
        self._synced = time.monotonic()

    def __enter__(self) -> _Results:
        try:
            _lock(self._file, self._path)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._file.fileno())
        self._file.close()

    def restore(self) -> set[Key]:
        """Keys of the lines answered already; a last line that begins like ours (or is zeros, as a crash of the
        system leaves them) and is not whole is taken off. BatchError where the file is none of
        ours."""
        done: set[Key] = set()
        self._file.seek(0)
        whole = 0  # bytes of whole lines
        with open(self._file.fileno(), "rb", closefd=False) as file:
            for number, line in enumerate(file, 1):
                key = _answered(line)
                if key is None:
                    torn = line.startswith(_BEGINS) or _BEGINS.startswith(line) or not line.strip(b"\0")
                    if not torn or file.readline():
                        raise BatchError(f"{self._path}, line {number}: not a line of results; name another file")
                    break
                done.add(key)
                whole += len(line)
        if whole < self._file.seek(0, os.SEEK_END):
            self._file.truncate(whole)
        return done

    def write(self, value: dict[str, Any]) -> None:
        data = memoryview((json.dumps(value, allow_nan=False) + "\n").encode("ascii"))
        while data:  # a regular file takes all at once, unless the disk is full
            data = data[self._file.write(data) :]
        if time.monotonic() - self._synced >= SYNC_EVERY:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()


def _answered(line: bytes) -> Key | None:
    """What a line of results answers; None if it is torn or no such line."""
    if not line.startswith(_BEGINS) or not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line)
        if isinstance(value["custom_id"], str):
            return value["custom_id"]
        return int(value["error"]["line"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # where there is no flock, two runs at once are the user's to avoid
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise BatchError(f"{path} is being written by another process") from None


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of every line that is not blank."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # editors on Windows put a byte-order mark first
            if line.strip():
                yield number, line


def scan_batch(path: str | os.PathLike[str]) -> dict[Key, int]:
    """Every line's key and number. BatchError when an id is there twice, OSError when the file cannot be read."""
    keys: dict[Key, int] = {}
    for number, line in _lines(path):
        key: Key
        try:
            key = _parse_line(line)[0]
        except _LineError as error:
            key = error.custom_id or number
        if key in keys:
            raise BatchError(f"{path}: custom_id {key!r} is on lines {keys[key]} and {number}; each needs its own")
        keys[key] = number
    return keys


def _parse_line(line: bytes) -> tuple[str, str, Any]:
    """(custom_id, url, body) of a line in."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _LineError("invalid_json", f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _LineError("invalid_request", "a line must be an object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise _LineError("invalid_custom_id", "custom_id must be a string that is not empty")
    try:
        custom_id.encode()
    except UnicodeEncodeError:
        raise _LineError("invalid_custom_id", "custom_id holds half of a surrogate pair") from None
    unknown = [name for name in value if name not in _FIELDS]
    if unknown:
        raise _LineError("unknown_field", f"unknown field {unknown[0]!r}; a line has {', '.join(_FIELDS)}", custom_id)
    if value.get("method") != "POST":
        raise _LineError("invalid_method", f"method must be POST, not {value.get('method')!r}", custom_id)
    if value.get("url") not in URLS:
        raise _LineError("invalid_url", f"url must be one of {', '.join(URLS)}, not {value.get('url')!r}", custom_id)
    return custom_id, value["url"], value.get("body")
