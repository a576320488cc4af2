"""`headrace run`: answer one prompt."""

from __future__ import annotations

import argparse
import sys

from headrace.cli.options import (
    add_engine_options,
    add_ledger_option,
    add_sampling_options,
    engine_args,
    sampling_params,
    stream_ledger,
)


def add_commands(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("run", help="answer one prompt", description="Answer one prompt, streamed.")
    parser.add_argument("prompt", nargs="?", help="the prompt; none: read from standard input")
    parser.add_argument("--system", help="a system message before the prompt")
    parser.add_argument("--raw", action="store_true", help="complete the text as it is, without the chat template")
    parser.add_argument("--quiet", action="store_true", help="print the answer only")
    parser.add_argument("--explain", action="store_true", help="where the time went, and why each option was chosen")
    add_ledger_option(parser)
    add_engine_options(parser)
    add_sampling_options(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    prompt = arguments.prompt
    if prompt is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError('give a prompt: headrace run "Why is the sky blue?"')
        prompt = sys.stdin.read()
    from headrace.cli.session import stream_answer
    from headrace.frontend.llm import LLM

    with LLM.from_args(engine_args(arguments), chat=not arguments.raw) as llm:
        stream_ledger(arguments, llm.engine.ledger)
        params = sampling_params(arguments, llm.default_params)
        if arguments.raw or llm.engine.chat_template.source is None:
            if arguments.system:
                raise ValueError("--system needs a chat template; leave out --raw or use a chat model")
            ready: str | list[int] = prompt
        else:
            messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
            ready = llm.render([*messages, {"role": "user", "content": prompt}])
        answer = stream_answer(llm, ready, params)
        if arguments.explain:
            print("\nWhy it ran this way:", file=sys.stderr)
            for choice in llm.engine.choices:
                print(f"  {choice.option} = {choice.value}: {choice.reason}", file=sys.stderr)
            print("\n" + llm.explain(), file=sys.stderr)
            bill = llm.bill(answer.output)
            if bill is not None:
                from headrace.ledger.explain_request import explain_bill

                print("\n" + explain_bill(bill, llm.engine.ledger.records()), file=sys.stderr)
        if not arguments.quiet:
            print(answer.speed(llm), file=sys.stderr)
    return 0
