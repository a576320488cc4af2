"""`headrace doctor`."""

from __future__ import annotations

import argparse


def add_commands(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what this machine has, and what is made of it",
        description="What this machine has, which kernels run on it and why, and what share of it decoding reaches.",
    )
    parser.add_argument("-m", "--model", help="model to decode with; none: one that is on disk", metavar="MODEL")
    parser.add_argument("--no-measure", action="store_true", help="measure nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=doctor)


def doctor(arguments: argparse.Namespace) -> int:
    from headrace.doctor.report import sections

    found = sections(not arguments.no_measure, arguments.model)
    if arguments.json:
        import json

        print(json.dumps([{"title": s.title, "findings": dict(s.findings), "problems": s.problems} for s in found]))
    else:
        print("\n\n".join("\n".join(section.lines()) for section in found))
    return 0
