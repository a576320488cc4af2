"""The `headrace` command. Heavy imports happen inside the commands, so that help is instant."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from headrace import __version__
from headrace.env import native_kernels

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # what a shell shows of a program that SIGPIPE ended

START_OBJECTS = 100_000  # a start makes about 70,000 that stay: none of them is garbage to look for
COLLECT_EVERY = 20_000  # objects, afterwards

COMMANDS = (
    "run",
    "chat",
    "serve",
    "batch",
    "explain",
    "models",
    "doctor",
    "bench",
    "profile",
    "train_heads",
)  # modules
ANSWERING = COMMANDS[:4]  # those that load a model and answer


def _parser(command: str = "") -> argparse.ArgumentParser:
    """`command`: what was asked for, if that is known; other commands' options, which take time, are then left out."""
    parser = argparse.ArgumentParser(
        prog="headrace", description="Serve language models, and know what bounds every step."
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    parser.set_defaults(prints=True)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in (command,) if command in COMMANDS else COMMANDS:
        import_module(f"headrace.cli.{name}").add_commands(commands)
    return parser


def _start_quickly(command: str) -> None:
    """What of a start can be saved before anything large is imported."""
    gc.set_threshold(START_OBJECTS)
    if _usual_collections not in gc.callbacks:
        gc.callbacks.append(_usual_collections)
    if command in ANSWERING and native_kernels():
        # numpy's linear algebra would start a thread for each processor: half of numpy's import, for nothing
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _usual_collections(phase: str, info: dict[str, int]) -> None:
    """Called when the collector runs. The first time it has been put off; from now on it runs as often as is usual."""
    if gc.get_threshold()[0] == START_OBJECTS:
        gc.set_threshold(COLLECT_EVERY)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code. Bad input is one line on stderr and exit code 2."""
    if sys.stderr is None:  # closed; print would write to stdout instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - to the end of the process
    arguments = argparse.Namespace()
    try:
        try:
            words = sys.argv[1:] if argv is None else argv
            command = words[0] if words else ""
            _start_quickly(command)
            arguments = _parser(command).parse_args(argv)
            if sys.stdout is None and arguments.prints:
                raise ValueError("standard output is closed")
            return int(arguments.command(arguments) or 0)
        finally:
            _tell_lost_ledger(arguments)
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where what goes wrong with it can be told
    except KeyboardInterrupt:
        print("\nheadrace: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader went away: `headrace run ... | head`
        _discard_stdout()
        return EXIT_BROKEN_PIPE
    except (ValueError, TypeError, OSError, MemoryError, ImportError, RuntimeError) as error:
        if isinstance(error, TypeError) and "option" not in str(error):
            raise
        if isinstance(error, RuntimeError) and "new thread" not in str(error):
            raise
        if isinstance(error, OSError) and sys.stdout is not None:
            _discard_stdout()
        print(f"headrace: error: {_line(error)}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, ImportError):
        return text
    while error.__cause__ is not None:  # libraries wrap it in pages of advice
        error = error.__cause__
    return f"a library cannot be loaded: {' '.join(str(error).split()) or type(error).__name__}"


def _tell_lost_ledger(arguments: argparse.Namespace) -> None:
    ledger = getattr(arguments, "streamed_ledger", None)
    if ledger is not None and ledger.stream_error:
        print(f"headrace: {arguments.ledger_jsonl} ends early: {ledger.stream_error}", file=sys.stderr)


def _discard_stdout() -> None:
    """What is buffered for a reader that is gone or a disk that is full must not fail once more when Python ends."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
