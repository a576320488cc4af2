"""Draft heads that come with Headrace for models it knows: folders as `headrace train-heads` makes them, in `models/`
of a clone or `heads/` of an installed package."""

from __future__ import annotations

from pathlib import Path

from headrace.loading.json_file import read_json

_PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = (_PACKAGE / "heads", _PACKAGE.parents[1] / "models")


def released_heads(name: str, num_bytes: int) -> Path | None:
    """The folder of heads made for the model file of this name and size; None if there are none."""
    for folder in FOLDERS:
        for facts in sorted(folder.glob("*/training.json")):
            said = read_json(facts)
            if (said.get("model"), said.get("model_bytes")) == (name, num_bytes):
                return facts.parent
    return None
