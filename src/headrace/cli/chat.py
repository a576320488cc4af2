"""`headrace chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.options import add_engine_options, add_sampling_options, engine_args, sampling_params

if TYPE_CHECKING:
    from headrace.frontend.llm import LLM
    from headrace.sampling.params import SamplingParams

HELP = """  /help            this list
  /system TEXT     set the system message and start over
  /clear           start over
  /retry           answer the last message again
  /set NAME VALUE  change a sampling option, e.g. /set temperature 0.7
  /save FILE       write the conversation as text
  /explain         where the time went
  /quit            leave (also: end of input, or Ctrl-C twice)"""


def add_commands(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "chat", help="talk with a model", description="A conversation; /help lists what can be typed."
    )
    parser.add_argument("--system", help="the system message")
    add_engine_options(parser)
    add_sampling_options(parser, skip=("n",))
    parser.set_defaults(command=chat)


def chat(arguments: argparse.Namespace) -> int:
    if sys.stdin is None:
        raise ValueError("standard input is closed; there is nothing to answer")
    from headrace.frontend.llm import LLM

    with LLM.from_args(engine_args(arguments)) as llm:
        recommended = llm.default_params
        if not hasattr(arguments, "model"):  # its file does not hold what its authors recommend
            recommended = recommended.with_(temperature=0.2, top_p=0.9)
        conversation = Conversation(llm, sampling_params(arguments, recommended), arguments.system)
        print(f"{llm.engine.checkpoint.name}; /help for commands", file=sys.stderr)
        return conversation.loop(_read)


def _read() -> str | None:
    """A line of the user's, None at the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


class Conversation:
    """Messages so far, and what the /commands do to them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None):
        self._llm = llm
        self._params = params
        self._system = system
        self.messages: list[dict[str, str]] = []

    def loop(self, read: Callable[[], str | None]) -> int:
        """Answer lines until the end of input, /quit, or Ctrl-C at the prompt twice in a row."""
        cancelled = False
        while True:
            try:
                line = read()
            except KeyboardInterrupt:
                if cancelled:
                    print(file=sys.stderr)
                    break
                print("\n[Ctrl-C again leaves]", file=sys.stderr)
                cancelled = True
                continue
            cancelled = False
            if line is None:
                break
            line = line.strip()
            if line in ("/quit", "/exit"):
                break
            try:
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self._answer(line)
            except KeyboardInterrupt:  # ends the answer, not the conversation
                print("\n[stopped]", file=sys.stderr)
            except BrokenPipeError:  # nobody reads the answers any more
                raise
            except (ValueError, OSError) as error:
                print(f"[{error}]", file=sys.stderr)
        return 0

    def _answer(self, text: str) -> None:
        from headrace.cli.session import stream_answer

        system = [{"role": "system", "content": self._system}] if self._system else []
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = stream_answer(self._llm, self._llm.render([*system, *messages]), self._params)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        print(answer.speed(self._llm), file=sys.stderr)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/help":
            print(HELP, file=sys.stderr)
        elif name == "/clear":
            self.messages = []
        elif name == "/system":
            self._system, self.messages = rest.strip() or None, []
        elif name == "/retry":
            if not self.messages:
                raise ValueError("there is nothing to answer again")
            last = self.messages[-2]["content"]
            self.messages = self.messages[:-2]
            self._answer(last)
        elif name == "/set":
            option, _, value = rest.strip().partition(" ")
            self._set(option, value.strip())
        elif name == "/save":
            if not rest.strip():
                raise ValueError("give a file name: /save FILE")
            text = "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages)
            Path(rest.strip()).write_text(text + "\n", encoding="utf-8")
        elif name == "/explain":
            print(self._llm.explain(), file=sys.stderr)
        else:
            raise ValueError(f"unknown command {name}; /help lists them")

    def _set(self, option: str, value: str) -> None:
        import ast

        known = [each.name for each in fields(self._params) if "help" in each.metadata and each.name != "n"]
        if option not in known:
            raise ValueError(f"/set takes a sampling option and a value; {option or 'nothing'!r} is none")
        try:
            parsed = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            parsed = value
        try:
            self._params = self._params.with_(**{option: parsed})
        except TypeError as error:
            raise ValueError(f"{option} cannot be {value or 'nothing'}: {error}") from None
