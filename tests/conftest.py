"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.device.cuda import maybe_present

if not maybe_present():
    # Triton's interpreter, for tests/gpu: read when Triton itself is imported, which torch or transformers may do first
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF, pulled into the cache ($HEADRACE_HOME) the first time a test needs it."""
    from headrace.loading.store import resolve_model

    return resolve_model(None)
