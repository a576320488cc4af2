"""`headrace explain`: what a ledger's file says of a step, a request, prefix misses, preemptions, or all of it."""

from __future__ import annotations

import argparse


def add_commands(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "explain",
        help="say where the time went",
        description="Explain a file that `headrace run`, `batch` or `bench` wrote with --ledger-jsonl.",
    )
    parser.add_argument("file", help="the ledger's file")
    parser.add_argument("--step", type=int, metavar="N", help="one step: what it did, what bound it, what was decided")
    parser.add_argument("--request", metavar="ID", help="one request's bill, and what would have made it faster")
    parser.add_argument("--misses", action="store_true", help="what the prefix cache found, and why not more")
    parser.add_argument("--preemptions", action="store_true", help="who lost its place when, and what it cost")
    parser.add_argument("--spec", action="store_true", help="what speculation brought, and from where on it pays")
    parser.set_defaults(command=explain)


def explain(arguments: argparse.Namespace) -> int:
    from headrace.ledger.book import Ledger
    from headrace.ledger.explain import explain_step, summarize
    from headrace.ledger.explain_request import explain_bill, explain_misses, explain_preemptions, facts_of, find_bill
    from headrace.ledger.explain_speculation import explain_speculation
    from headrace.ledger.jsonl import read_ledger

    found = read_ledger(arguments.file)
    if not found.records and not found.bills:
        raise ValueError(f"{arguments.file} holds no record of a ledger")
    texts = []
    if arguments.step is not None:
        steps = [record for record in found.records if record.step_id == arguments.step]
        if not steps:
            ids = [record.step_id for record in found.records]
            there = f"steps {min(ids)} to {max(ids)}" if ids else "no steps"
            raise ValueError(f"no step {arguments.step} in {arguments.file}, which holds {there}")
        texts += [explain_step(record) for record in steps]
    if arguments.request is not None:
        texts.append(explain_bill(find_bill(found.bills, arguments.request), found.records))
    if arguments.misses:
        texts.append(explain_misses(found.records))
    if arguments.preemptions:
        texts.append(explain_preemptions(found.records, found.bills))
    if arguments.spec:
        texts.append(explain_speculation(found.records))
    if not texts:
        ledger = Ledger(facts_of(found.records), capacity=max(len(found.records), len(found.bills)))
        for record in found.records:
            ledger.add(record)
        for bill in found.bills:
            ledger.add_bill(bill)
        texts.append(summarize(ledger))
    print("\n\n".join(texts))
    return 0
