"""Servers shared by the tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

for name in ("openai", "uvicorn", "zmq", "msgspec", "prometheus_client"):
    pytest.importorskip(name)

from harness import Server, fake_command, serve_command  # noqa: E402

from tiny import TEMPLATE, write_tiny_llama  # noqa: E402

STRICT_TEMPLATE = (
    "{% for message in messages %}{% if not loop.first and message.role == 'user' and loop.previtem.role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + TEMPLATE
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(tiny_model, tmp_path_factory) -> Iterator[Server]:
    """The tiny model, with a template that wants roles to alternate."""
    template = tmp_path_factory.mktemp("templates") / "strict.jinja"
    template.write_text(STRICT_TEMPLATE)
    options = ("--served-model-name", "tiny", "--chat-template", str(template), "--max-num-seqs", "8")
    with Server(serve_command(tiny_model, *options)) as running:
        yield running
        assert running.is_idle(), "something was left over"


@pytest.fixture(scope="session")
def slow(tiny_model) -> Iterator[Server]:
    """A fake engine of 4 rows whose steps take 10 ms."""
    with Server(fake_command(tiny_model, "--max-num-seqs", "4"), {"FAKE_STEP_SECONDS": "0.01"}) as running:
        yield running
