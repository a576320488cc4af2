"""Draft heads that come with Headrace for models it knows: folders as `headrace train-heads` makes them, in `models/`
of a clone or `heads/` of an installed package."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from headrace.loading.errors import CheckpointError
from headrace.loading.json_file import read_json

_log = logging.getLogger(__name__)
_PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = (_PACKAGE / "heads", _PACKAGE.parents[1] / "models")


def model_identity(target: Any) -> dict[str, Any] | None:
    """What a model (loading/checkpoint.py) says of itself, whatever its file is called: the name that a GGUF file
    holds, and sizes; None where there is no name."""
    name = getattr(getattr(target, "file", None), "metadata", {}).get("general.name")
    if not isinstance(name, str) or not name:
        return None
    spec = target.spec
    sizes = {"hidden_size": spec.hidden_size, "num_layers": spec.num_layers, "vocab_size": spec.vocab_size}
    return {"name": name, **sizes}


def released_heads(name: str, num_bytes: int, identity: dict[str, Any] | None = None) -> Path | None:
    """The folder of heads made for the model file of this name and size, or for a model of this identity; None if there
    are none. Folders with a damaged training.json are left out, with a line in the log."""
    for folder in FOLDERS:
        for facts in sorted(folder.glob("*/training.json")):
            try:
                said = read_json(facts)
            except CheckpointError as error:  # heads of one model must not keep another from running
                _log.warning("headrace: draft heads in %s are left out: %s", facts.parent, error)
                continue
            same_file = (said.get("model"), said.get("model_bytes")) == (name, num_bytes)
            if same_file or (identity is not None and said.get("identity") == identity):
                return facts.parent
    return None
