"""Choosing a backend, and saying why not."""

from __future__ import annotations

import pytest

from headrace.attention import select
from headrace.attention.base import AttentionCaps, LayerAttention
from headrace.attention.reference import ReferenceAttention
from headrace.attention.select import select_backend

LAYERS = [LayerAttention(0.1, 4, 2, 8), LayerAttention(0.1, 4, 2, 8, window=5)]


class Picky:
    name = "picky"
    caps = AttentionCaps(
        devices=frozenset({"cuda"}), kv_formats=frozenset({"bf16"}), head_dims=frozenset({64}), windows=False
    )

    def __init__(self, block_size: int):
        raise AssertionError("refused backends are not made")


@pytest.fixture(autouse=True)
def only_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "BACKENDS", {"reference": ReferenceAttention})


def test_reference_serves_float32_on_the_cpu() -> None:
    backend, refusals = select_backend("cpu", "float32", LAYERS, 16)
    assert backend.name == "reference"
    assert refusals == []


def test_passed_over_backends_are_listed_with_every_reason_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "BACKENDS", {"picky": Picky, **select.BACKENDS})
    backend, [(name, reasons)] = select_backend("cpu", "float32", LAYERS, 16)
    assert backend.name == "reference"
    assert name == "picky"
    assert len(reasons) == 4 and "has no sliding window" in reasons
    with pytest.raises(ValueError, match=r"picky: runs on cuda, not on cpu, reads KV as bf16"):
        select_backend("cpu", "float32", LAYERS, 16, override="picky")


class Absent:
    name = "absent"
    caps = AttentionCaps(devices=frozenset({"cpu"}), kv_formats=frozenset({"float32"}))

    @staticmethod
    def unavailable() -> str | None:
        return "was not built"


def test_a_backend_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "BACKENDS", {"absent": Absent, **select.BACKENDS})
    backend, refusals = select_backend("cpu", "float32", LAYERS, 16)
    assert backend.name == "reference"
    assert refusals == [("absent", ["was not built"])]


def test_none_left() -> None:
    with pytest.raises(ValueError, match=r"reference: runs on cpu, not on metal, .*block size 48 neither divides 64"):
        select_backend("metal", "float32", LAYERS, 48)


def test_unknown_override() -> None:
    with pytest.raises(ValueError, match="'fast'; there are: reference"):
        select_backend("cpu", "float32", LAYERS, 16, override="fast")
