"""Draft heads that come with Headrace for models it knows: folders as `headrace train-heads` makes them, in `models/`
of a clone or `heads/` of an installed package."""

from __future__ import annotations

import logging
from pathlib import Path

from headrace.loading.errors import CheckpointError
from headrace.loading.json_file import read_json

_log = logging.getLogger(__name__)
_PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = (_PACKAGE / "heads", _PACKAGE.parents[1] / "models")


def released_heads(name: str, num_bytes: int) -> Path | None:
    """The folder of heads made for the model file of this name and size; None if there are none. Folders with a
    damaged training.json are left out, with a line in the log."""
    for folder in FOLDERS:
        for facts in sorted(folder.glob("*/training.json")):
            try:
                said = read_json(facts)
            except CheckpointError as error:  # heads of one model must not keep another from running
                _log.warning("headrace: draft heads in %s are left out: %s", facts.parent, error)
                continue
            if (said.get("model"), said.get("model_bytes")) == (name, num_bytes):
                return facts.parent
    return None
