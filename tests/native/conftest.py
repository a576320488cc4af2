"""Every code path that this processor can run, and any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.device.cpu import num_threads
from headrace.ops.native.library import LIBRARY, available, available_paths, library, open_library
from headrace.ops.native.variants import bind_native
from headrace.ops.registry import using

if not available():
    collect_ignore_glob = ["test_*.py"]
    PATHS: list[str] = []
else:
    PATHS = available_paths()


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """The library on one code path, native variants bound, three threads."""
    before = library().path
    open_library(LIBRARY, request.param)
    library().set_num_threads(3)
    with using():
        bind_native()
        yield request.param
    library().set_num_threads(num_threads())
    open_library(LIBRARY, before)
