"""Options that cannot be are refused before anything is loaded, and the message says what would do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.config import ConfigError, EngineArgs, parse_bytes
from headrace.device.cpu import CpuFacts
from headrace.models.spec import ModelSpec
from headrace.ops.native.library import LIBRARY
from headrace.resolve import resolve

SPEC = ModelSpec(
    family="llama", vocab_size=96, hidden_size=32, intermediate_size=80, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, norm_eps=1e-6, max_position=512,
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_draft_tokens": "8", "speculate": "ngram"}, "an integer from 1 to 64, not '8'"),
        ({"num_draft_tokens": True, "speculate": "ngram"}, "an integer from 1 to 64"),
        ({"steps_in_flight": 1.0}, "an integer from 1 to 3, not 1.0"),
        ({"model": 5}, "model must be a string"),
        ({"attention_backend": 5}, "attention_backend must be a string"),
        ({"ledger": "no"}, "ledger must be True or False"),
        ({"mode": ["exact"]}, "mode must be one of"),
        ({"num_threads": 10**400}, "num_threads must be an integer from 1 to 2147483647"),
        ({"max_num_seqs": 10**5000}, "thousands of digits"),
        ({"kv_cache": 10**400}, "more than any machine has"),
        ({"kv_cache": "9" * 500}, "takes bytes such as 512MiB"),
        ({"kv_cache": "9e99GB"}, "takes bytes such as 512MiB"),
        ({"kv_cache": "900%"}, "more than there is"),
        ({"kv_cache": "5i"}, "takes bytes"),
        ({"kv_cache": 1.5}, "takes bytes"),
        ({"kv_cache": True}, "takes bytes"),
        ({"kv_cache": 0}, "above zero"),
        ({"kv_cache": -5}, "above zero"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as stop:
        EngineArgs(**options)
    assert words in str(stop.value) and len(str(stop.value)) < 200


def test_a_path_is_a_model() -> None:
    assert EngineArgs(model=Path("/a/b.gguf")).model == "/a/b.gguf"  # type: ignore[arg-type]


def test_bytes() -> None:
    for text, value in (("512MiB", 512 << 20), ("2GB", 2 * 10**9), ("1.5k", 1500), (77, 77), ("30%", 300), ("8 b", 8)):
        assert parse_bytes(text, 1000, "x") == value


def test_threads_are_cut_to_the_processors() -> None:
    facts = CpuFacts(4, 1 << 30, 1 << 30)
    for asked, threads, reason in ((None, 4, "may use"), (2, 2, "as asked"), (1000, 4, "1000 were asked for")):
        config, _, choices = resolve(EngineArgs(num_threads=asked), SPEC, facts)
        (choice,) = (choice for choice in choices if choice.option == "num_threads")
        assert config.num_threads == threads == int(choice.value) and reason in choice.reason


def test_only_a_missing_library_has_the_remedy_of_building_it(tmp_path: Path) -> None:
    code = "from headrace.ops.native.library import remedy, unavailable_reason as why; print(why(), '|', remedy())"
    for changes, reason, compiler in (
        ({"HEADRACE_NATIVE_PATH": "nonsense"}, "must be one of", False),
        ({"HEADRACE_NATIVE_LIBRARY": str(tmp_path / "none.so")}, "not built", True),
    ):
        environment = {**os.environ, "HEADRACE_NATIVE": "1", **changes}
        told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout
        assert "libheadrace" not in told and (reason in told or not LIBRARY.exists())
        assert ("install a C++17 compiler" in told) == (compiler or not LIBRARY.exists()), told
