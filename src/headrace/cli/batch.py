"""`headrace batch`: answer a file of requests."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from headrace.cli.options import add_engine_options, add_ledger_option, engine_args, stream_ledger

if TYPE_CHECKING:
    from headrace.frontend.batch import BatchSummary


def add_commands(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "batch",
        help="answer a file of requests",
        description="Answer a file of requests in OpenAI's batch form. Interrupted, the same command goes on.",
    )
    parser.add_argument("input", help="requests, one JSON object a line: custom_id, method, url, body")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="results, appended to")
    parser.add_argument("--max-in-flight", type=int, metavar="N", help="most lines submitted at once (twice the rows)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no summary")
    parser.add_argument("--explain", action="store_true", help="where the time went")
    add_ledger_option(parser)
    add_engine_options(parser)
    parser.set_defaults(command=batch)


def batch(arguments: argparse.Namespace) -> int:
    from headrace.frontend.batch import BatchSummary, check_target, run_batch_file, scan_batch
    from headrace.frontend.llm import LLM
    from headrace.frontend.progress import progress_bar

    # what is wrong with the files is said before the model is loaded
    latest = BatchSummary(num_lines=len(scan_batch(arguments.input)))
    check_target(arguments.input, arguments.output)
    with LLM.from_args(engine_args(arguments)) as llm, progress_bar("lines", show=not arguments.quiet) as bar:
        stream_ledger(arguments, llm.engine.ledger)
        rows = llm.engine.config.max_num_seqs

        def tell(summary: BatchSummary) -> None:
            nonlocal latest
            latest = summary
            bar.show(summary.num_skipped + summary.num_done, summary.num_lines, summary.output_tokens)

        try:
            latest = run_batch_file(
                llm.engine,
                arguments.input,
                arguments.output,
                llm.default_params,
                max_in_flight=2 * rows if arguments.max_in_flight is None else arguments.max_in_flight,
                progress=tell,
            )
        except KeyboardInterrupt:
            bar.close()
            left = latest.num_lines - latest.num_skipped - latest.num_done
            print(f"\n{latest.line()}\n{left} lines are left; the same command goes on with them", file=sys.stderr)
            raise
        bar.close()
        if not arguments.quiet:
            print(latest.line(), file=sys.stderr)
        if arguments.explain:
            print("\n" + llm.explain(), file=sys.stderr)
    return 0
