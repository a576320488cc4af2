"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from headrace.device.cuda import maybe_present

if not maybe_present():
    # Triton's interpreter, for tests/gpu: read when Triton itself is imported, which torch or transformers may do first
    os.environ["TRITON_INTERPRET"] = "1"

# the same examples in every run; HYPOTHESIS_SEARCH=1 looks for new ones
settings.register_profile("same", derandomize=True)
if not os.environ.get("HYPOTHESIS_SEARCH"):
    settings.load_profile("same")


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF, pulled into the cache ($HEADRACE_HOME) the first time a test needs it."""
    from headrace.loading.store import resolve_model

    return resolve_model(None)
