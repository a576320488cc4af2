"""`headrace pull` and `headrace models`."""

from __future__ import annotations

import argparse


def add_commands(commands: argparse._SubParsersAction) -> None:
    puller = commands.add_parser("pull", help="fetch a model", description="Fetch a model into the cache.")
    puller.add_argument("name", nargs="?", help="built-in name or hub id (org/name); none: smollm2-135m")
    puller.set_defaults(command=pull)
    lister = commands.add_parser("models", help="list models", description="List the models in the cache.")
    lister.add_argument("--supported", action="store_true", help="list the families that can be run, and their formats")
    lister.set_defaults(command=models)


def pull(arguments: argparse.Namespace) -> int:
    from headrace.loading import store

    print(store.pull(arguments.name))
    return 0


def models(arguments: argparse.Namespace) -> int:
    if arguments.supported:
        from headrace.models.registry import supported

        print(f"{'family':12}{'formats':12}for example")
        for name, family in supported().items():
            print(f"{name:12}{', '.join(family.formats):12}{', '.join(family.examples)}")
        return 0
    from headrace.loading import store

    found = store.list_models()
    if not found:
        print("no models yet; `headrace pull` fetches smollm2-135m")
    for each in found:
        print(f"{each.name:32} {each.num_bytes / 1e6:10.1f} MB  {each.path}")
    return 0
