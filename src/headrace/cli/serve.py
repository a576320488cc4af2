"""`headrace serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from headrace.cli.options import add_engine_options, add_options, engine_args
from headrace.server.options import ServerArgs


def add_commands(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "serve", help="serve the OpenAI API", description="Serve a model over HTTP with OpenAI's API."
    )
    parser.add_argument(
        "--ledger-jsonl", metavar="FILE", help="write each step's record and each request's bill as lines of JSON"
    )
    add_options(parser, ServerArgs, "server")
    add_engine_options(parser)
    parser.set_defaults(command=serve, prints=False)


def serve(arguments: argparse.Namespace) -> int:
    engine, server = engine_args(arguments), server_args(arguments)
    try:
        from headrace.server.run import serve as run
        from headrace.server.service import Service
    except ImportError as error:
        raise ValueError(
            f"{error.name} is missing: pip install 'headrace[serve]' (in a clone: pip install -e '.[serve]') to serve"
        ) from None
    return run(Service(server, engine, ledger_jsonl=arguments.ledger_jsonl))


def server_args(arguments: argparse.Namespace) -> ServerArgs:
    """The server's options as given on the command line."""
    given: dict[str, Any] = {}
    for each in fields(ServerArgs):
        if hasattr(arguments, each.name):
            value = getattr(arguments, each.name)
            given[each.name] = tuple(value) if isinstance(value, list) else value
    return ServerArgs(**given)
