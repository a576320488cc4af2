"""The `headrace` command. Heavy imports happen inside the commands, so that help is instant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from headrace import __version__

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def _parser() -> argparse.ArgumentParser:
    from headrace.cli import batch, bench, chat, explain, models, run, serve

    parser = argparse.ArgumentParser(
        prog="headrace", description="Serve language models, and know what bounds every step."
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (run, chat, serve, batch, explain, models, bench):
        module.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code. Bad input is one line on stderr and exit code 2."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.command(arguments) or 0)
    except KeyboardInterrupt:
        print("\nheadrace: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader went away: `headrace run ... | head`
        sys.stderr.close()
        return EXIT_BAD_INPUT
    except (ValueError, TypeError, OSError, MemoryError) as error:
        if isinstance(error, TypeError) and "option" not in str(error):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"headrace: error: {text}", file=sys.stderr)
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
