"""Reading a JSON object from a file of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.loading.errors import CheckpointError


def read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError names the file and the problem."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise CheckpointError(f"{path}: there is no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value
