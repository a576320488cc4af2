"""One process that goes from code path to code path: each gives its own bits, in engines and in replayed steps.

Weights are packed in one layout for all paths, and a recorded step names calls of the library, not a path's functions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.layers.weights import WeightSource
from headrace.loading.checkpoint import open_checkpoint
from headrace.models.registry import build_model
from headrace.ops.native.library import LIBRARY, available_paths, library, open_library
from headrace.ops.native.variants import bind_native
from headrace.ops.registry import using
from headrace.quant.packed import Packed
from headrace.worker import recorded
from native.test_native_model import write_model
from native.test_recording import World
from tiny import write_tiny_llama

PATHS = available_paths()
STEPS = 12


@pytest.fixture(autouse=True)
def _the_path_comes_back() -> Any:
    before = library().path
    with using():
        bind_native()
        yield
    open_library(LIBRARY, before)


@pytest.mark.parametrize("mode", ["exact", "default", "fast", "int8"])
def test_replayed_steps_on_paths_in_turns(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "EAGER_STEPS", 0)
    file = write_model(tmp_path / "m.gguf", {"": "Q4_1", "ffn_down": "Q6_K", "attn_v": "Q8_0"})
    checkpoint = open_checkpoint(file)
    model = build_model(checkpoint.spec, WeightSource(checkpoint), Packed(mode))

    def steps(world: World, row: int, path: str) -> list[np.ndarray]:
        open_library(LIBRARY, path)
        return [world.step([row])]

    alone = []
    for row, path in enumerate(PATHS):
        world = World(model, len(PATHS))
        alone.append([steps(world, row, path) for _ in range(STEPS)])
    world = World(model, len(PATHS))  # one launcher: what one path recorded is replayed on all the others
    in_turns: list[list[Any]] = [[] for _ in PATHS]
    for _ in range(STEPS):
        for row, path in enumerate(PATHS):
            in_turns[row].append(steps(world, row, path))
    assert len(world.launcher._programs) == 1
    np.testing.assert_array_equal(in_turns, alone)


def test_the_paths_of_tiles_differ_from_the_others(tmp_path: Path) -> None:
    """What the test above compares is not one arithmetic under several names."""
    tiles = [path for path in PATHS if path.startswith("amx")]
    if not tiles:
        pytest.skip("no path with tiles on this processor")
    file = write_model(tmp_path / "m.gguf", {"": "Q4_1"})
    checkpoint = open_checkpoint(file)
    model = build_model(checkpoint.spec, WeightSource(checkpoint), Packed("default"))
    found = {}
    for path in (*tiles, "avx512"):
        open_library(LIBRARY, path)
        found[path] = World(model).step([0])
    assert not np.array_equal(found[tiles[0]], found["avx512"])
    for path in tiles:
        np.testing.assert_array_equal(found[path], found[tiles[0]])


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("quantize", ["q4", "q8"])
def test_engines_on_paths_in_turns(tmp_path: Path, quantize: str, group: int) -> None:
    """Batches of one, few and many rows and a long prompt, in engines of each mode that stay open side by side."""
    folder = write_tiny_llama(tmp_path / "m", hidden=64, inner=192, dim=16)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    work = [[[5, 9, 3]], [[7 + row] * 5 for row in range(8)], [[3 + row, 2] for row in range(20)], [[4, 8] * 45]]

    def engine(mode: str) -> LLM:
        options: dict[str, Any] = {"quantize": quantize, "quantize_group": group, "num_threads": 2, "max_num_seqs": 32}
        return LLM(str(folder), mode=mode, device="cpu", prefix_caching=False, **options)

    def answers(llm: LLM, path: str) -> list[Any]:
        open_library(LIBRARY, path)
        outputs = [output.outputs[0] for prompts in work for output in llm.generate(prompts, params)]
        return [(output.token_ids, output.cumulative_logprob) for output in outputs]

    modes = ("default", "fast", "exact")
    alone = {}
    for path in PATHS:
        for mode in modes:
            with engine(mode) as llm:
                alone[path, mode] = answers(llm, path)
    llms = {mode: engine(mode) for mode in modes}
    for _ in range(2):
        for mode, llm in llms.items():
            for path in PATHS:
                assert answers(llm, path) == alone[path, mode], (path, mode)
