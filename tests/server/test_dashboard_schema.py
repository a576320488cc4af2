"""docs/monitoring/dashboard.json against Grafana's own schema of dashboards, as its SDK's classes have it."""

from __future__ import annotations

import copy
import json
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grafana_foundation_sdk")
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

register_default_plugins()
PATH = Path(__file__).parent.parent.parent / "docs" / "monitoring" / "dashboard.json"


def faults(board: dict[str, Any]) -> list[str]:
    """Fields that the schema does not know, lacks or has with another type."""
    try:
        read = Dashboard.from_json(board)
        return [*_lost(board, json.loads(JSONEncoder().encode(read)), ""), *_mistyped(read, Dashboard, "")]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [f"{type(error).__name__}: {error}"]


def _lost(given: Any, kept: Any, path: str) -> list[str]:
    """What reading and writing it does not bring back."""
    if isinstance(given, dict) and isinstance(kept, dict):
        missing = [f"{path}/{name} is unknown" for name in given.keys() - kept.keys()]
        return missing + [each for name in given.keys() & kept.keys()
                          for each in _lost(given[name], kept[name], f"{path}/{name}")]  # fmt: skip
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [each for index, pair in pairs for each in _lost(*pair, f"{path}/{index}")]
    return [] if given == kept else [f"{path} became {kept!r}"]


def _mistyped(value: Any, hint: Any, path: str) -> list[str]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object):
        return []
    if origin in (typing.Union, types.UnionType):
        found = [_mistyped(value, each, path) for each in arguments]
        return [] if [] in found else min(found, key=len)
    if origin is typing.Literal:
        return [] if value in arguments else [f"{path} is {value!r}, none of {arguments}"]
    if origin is list and isinstance(value, list):
        return [each for index, item in enumerate(value) for each in _mistyped(item, arguments[0], f"{path}/{index}")]
    if origin is dict and isinstance(value, dict):
        return [each for name, item in value.items() for each in _mistyped(item, arguments[1], f"{path}/{name}")]
    if hint is float and type(value) is int:
        return []
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [] if value in [each.value for each in hint] else [f"{path} is {value!r}, no {hint.__name__}"]
    if not isinstance(hint, type):
        return [f"{path} is {value!r}, not {hint}"]
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is int):
        return [f"{path} is {value!r}, not {hint.__name__}"]
    if type(value).__module__ == "builtins":
        return []
    hints = typing.get_type_hints(type(value))
    return [each for name, inner in vars(value).items() for each in _mistyped(inner, hints[name], f"{path}/{name}")]


def test_the_dashboard_fits_grafanas_schema():
    assert faults(json.loads(PATH.read_text())) == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((), ("schemaVersion", "39")),
        ((), ("panelz", [])),
        (("panels", 1), ("title", 5)),
        (("panels", 1, "gridPos"), ("w", "24")),
        (("panels", 1, "targets", 0), ("expression", "up")),
        (("panels", 1, "fieldConfig", "defaults"), ("unit", 1)),
        (("templating", "list", 0), ("type", "bogus")),
    ],
)
def test_a_wrong_one_does_not(place, value):
    board = copy.deepcopy(json.loads(PATH.read_text()))
    inner: Any = board
    for step in place:
        inner = inner[step]
    inner[value[0]] = value[1]
    assert faults(board)
