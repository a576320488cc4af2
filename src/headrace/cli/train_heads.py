"""`headrace train-heads`: draft heads for a model, from text that it writes itself."""

from __future__ import annotations

import argparse
import errno
import sys

from headrace.cli.options import add_engine_options, add_options, engine_args, given_options

_NOT_HERE = (
    "speculate",
    "verify",
    "synthetic_acceptance",
    "draft_model",
    "num_draft_tokens",
    "suffix_tokens",
    "draft_tree",
)


def add_commands(commands: argparse._SubParsersAction) -> None:
    from headrace.train.settings import TrainArgs

    parser = commands.add_parser(
        "train-heads",
        help="train draft heads for a model",
        description="Let a model write texts, and train an EAGLE head or Medusa heads on them, which make it faster "
        "with --speculate. Interrupted, the same command goes on.",
    )
    parser.add_argument(
        "prompts", nargs="*", help="files of prompts, or folders of them: .txt or .jsonl, one prompt a line, or .gz"
    )
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="where the heads go")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    add_options(parser, TrainArgs, "training")
    add_engine_options(parser, skip=_NOT_HERE)
    parser.set_defaults(command=train)


def train(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from headrace.train.settings import TrainArgs

    settings = TrainArgs(**given_options(TrainArgs, arguments))
    args = engine_args(arguments)
    try:
        from headrace.train.heads import train_heads
    except ImportError as error:
        raise ImportError(f"{error.name} is missing; pip install 'headrace[train]'") from None

    def tell(line: str) -> None:
        if not arguments.quiet:
            print(line, file=sys.stderr, flush=True)

    show = not arguments.quiet
    try:
        train_heads(args, settings, arguments.prompts, Path(arguments.output), tell, show_progress=show)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        where = settings.work or arguments.output
        raise OSError(f"the disk of {where} is full; make room, and the same command goes on") from None
    return 0
