"""`headrace profile`: which kernels and calls a run spends its time on."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.cli.options import add_engine_options, engine_args


def add_commands(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "profile",
        help="trace a run",
        description="Run one batch and write what its time went to: a trace of kernels (on a GPU) or a table of calls "
        "(on a CPU), and the ledger's records of the steps. LLM.profile(FOLDER) does the same to a running engine.",
    )
    parser.add_argument("-o", "--output", default="headrace-profile", metavar="FOLDER", help="default headrace-profile")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="requests (default 1)")
    parser.add_argument("--prompt-len", type=int, default=128, metavar="N", help="tokens of each prompt (default 128)")
    parser.add_argument("--output-len", type=int, default=16, metavar="N", help="tokens of each answer (default 16)")
    add_engine_options(parser)
    parser.set_defaults(command=profile)


def profile(arguments: argparse.Namespace) -> int:
    for name in ("batch_size", "prompt_len", "output_len"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    from headrace.bench.measure import random_prompts, run_batch
    from headrace.frontend.llm import LLM
    from headrace.frontend.profiling import make_folder

    make_folder(Path(arguments.output))  # what is wrong with it is said before a model is loaded
    with LLM.from_args(engine_args(arguments)) as llm:
        prompts = random_prompts(llm.engine.spec.vocab_size, arguments.batch_size, arguments.prompt_len)
        for _ in range(2):  # compilers, caches and graphs have done their work then
            run_batch(llm, prompts, arguments.output_len)
        with llm.profile(arguments.output) as lines:
            run_batch(llm, prompts, arguments.output_len)
    print("\n".join(lines))
    return 0
