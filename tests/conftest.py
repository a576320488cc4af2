"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF, pulled into the cache ($HEADRACE_HOME) the first time a test needs it."""
    from headrace.loading.store import resolve_model

    return resolve_model(None)
