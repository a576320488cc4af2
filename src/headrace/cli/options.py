"""Command-line options generated from the dataclasses that hold them: one field, one flag, one help text."""

from __future__ import annotations

import argparse
import types
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from headrace.config import EngineArgs
from headrace.sampling.params import SamplingParams

if TYPE_CHECKING:
    from headrace.ledger.book import Ledger


def _flag(parser: Any, each: Field[Any], hint: Any) -> None:
    text = each.metadata["help"].replace("%", "%%")
    name = "--" + each.name.replace("_", "-")
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] if _is_union(hint) else [hint]
    if bool in kinds:
        parser.add_argument(name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        return
    settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
    if get_origin(kinds[0]) is Literal:
        settings["choices"] = get_args(kinds[0])
    elif get_origin(kinds[0]) is tuple:
        settings.update(action="append", type=get_args(kinds[0])[0])
    elif str not in kinds:
        settings["type"] = kinds[0]
    if "choices" not in settings:
        settings["metavar"] = {int: "N", float: "X"}.get(settings.get("type", str), "TEXT")
    parser.add_argument(name, **settings)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def add_options(parser: argparse.ArgumentParser, cls: type, title: str, skip: tuple[str, ...] = ()) -> None:
    """A flag for every field of `cls` that has a help text. A flag that is not given is absent from the result."""
    group = parser.add_argument_group(title)
    hints = get_type_hints(cls)
    for each in fields(cls):
        if "help" in each.metadata and each.name not in skip:
            _flag(group, each, hints[each.name])


def add_engine_options(parser: argparse.ArgumentParser, skip: tuple[str, ...] = ()) -> None:
    parser.add_argument("-m", "--model", default=argparse.SUPPRESS, help=_help(EngineArgs, "model"), metavar="MODEL")
    add_options(parser, EngineArgs, "engine", skip=("model", *skip))


def add_sampling_options(parser: argparse.ArgumentParser, skip: tuple[str, ...] = ()) -> None:
    add_options(parser, SamplingParams, "sampling (where not given: what the model recommends)", skip)


def add_ledger_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ledger-jsonl", metavar="FILE", help="write each step's record and each request's bill as lines of JSON"
    )


def stream_ledger(arguments: argparse.Namespace, ledger: Ledger) -> None:
    """Do what --ledger-jsonl asks, from now until the engine is closed."""
    if arguments.ledger_jsonl:
        if not ledger.enabled:
            raise ValueError("--ledger-jsonl needs the ledger; leave out --no-ledger")
        ledger.stream_to(arguments.ledger_jsonl)
        arguments.streamed_ledger = ledger  # main tells if the file came to an early end


def _help(cls: type, name: str) -> str:
    return str(next(each for each in fields(cls) if each.name == name).metadata["help"])


def given_options(cls: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given of the fields of `cls`."""
    return {each.name: getattr(arguments, each.name) for each in fields(cls) if hasattr(arguments, each.name)}


def engine_flags(arguments: argparse.Namespace) -> list[str]:
    """The engine's options, but for the model, as another command line would give them."""
    flags: list[str] = []
    for name, value in given_options(EngineArgs, arguments).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif name != "model":
            flags += [f"--{flag}={each}" for each in (value if isinstance(value, list) else [value])]
    return flags


def engine_args(arguments: argparse.Namespace) -> EngineArgs:
    """The engine's options as given on the command line."""
    return EngineArgs.make(**given_options(EngineArgs, arguments))


def sampling_params(arguments: argparse.Namespace, base: SamplingParams) -> SamplingParams:
    """`base`, changed by what was given on the command line."""
    given = given_options(SamplingParams, arguments)
    return base.with_(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
