"""Replayed steps give the bits of eager ones, for any rows, whatever was recorded before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.layers.weights import WeightSource
from headrace.loading.checkpoint import open_checkpoint
from headrace.models.registry import build_model
from headrace.ops.native.library import library
from headrace.ops.native.recording import record
from headrace.ops.native.variants import bind_references
from headrace.ops.registry import using
from headrace.quant.packed import Packed
from headrace.worker import recorded
from headrace.worker.recorded import RecordedLauncher
from native.test_native_model import write_model
from tiny import write_tiny_llama

PROMPTS = [[5, 9, 3], [7] * 40, [1, 2], [8, 3, 4, 60, 2, 11]]


def generate(folder: Path, prompts: list[list[int]], length: int = 30, **options: Any) -> tuple[list[list[int]], Any]:
    with LLM(str(folder), prefix_caching=False, **options) as llm:
        launcher = llm.engine._worker._runner._launcher
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        outputs = [llm.engine.submit(prompt, params) for prompt in prompts]
        while any(not output.finished for output in outputs):
            llm.engine.step()
        return [list(output.outputs[0].token_ids) for output in outputs], launcher


@pytest.mark.parametrize("window", [None, 20])
def test_the_engine_replays_what_it_would_compute(
    path: str, tmp_path: Path, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_llama(tmp_path / "m", window=window)
    found, launcher = generate(folder, PROMPTS)
    assert launcher._programs and not launcher._refused
    calls = [len(program.recording._calls) for program in launcher._programs.values()]
    assert min(calls) > 10
    few, _ = generate(folder, PROMPTS, max_num_seqs=2, max_num_batched_tokens=3)  # other shapes, chunks
    assert few == found
    monkeypatch.setattr(recorded, "EAGER_STEPS", 10**9)
    monkeypatch.setattr(recorded, "SMALL", 0)
    eager, launcher = generate(folder, PROMPTS)
    assert not launcher._programs
    assert eager == found


def test_hidden_states_are_the_same_bits(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "m.gguf", {"": "Q4_1", "ffn_down": "Q6_K", "attn_v": "Q8_0"})
    checkpoint = open_checkpoint(folder)
    spec = checkpoint.spec
    monkeypatch.setattr(recorded, "SMALL", 0)
    for mode in ("exact", "default", "fast", "int8"):
        model = build_model(spec, WeightSource(checkpoint), Packed(mode))
        steps: dict[bool, list[np.ndarray]] = {}
        for replay in (False, True):
            monkeypatch.setattr(recorded, "EAGER_STEPS", 0 if replay else 10**9)
            world = World(model)
            steps[replay] = [world.step([0, 1]) for _ in range(3)]
            steps[replay] += [world.step([1]), world.step([1]), world.step([0, 1, 2])]
            steps[replay] += [world.step([2, 0]) for _ in range(80)]  # more blocks than the recording saw
            assert bool(world.launcher._programs) == replay
        for eager, replayed in zip(steps[False], steps[True], strict=True):
            np.testing.assert_array_equal(replayed, eager)


def test_a_step_that_is_not_replayed_is_told_apart(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_llama(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    world = World(build_model(checkpoint.spec, WeightSource(checkpoint), Packed("default")))
    for small, told in ((32, [True, False, False, False]), (0, [True, True, True, False])):
        world.launcher = RecordedLauncher(world.launcher._forward)
        monkeypatch.setattr(recorded, "SMALL", small)
        found = []
        for _ in range(4):
            world.step([0, 1])
            found.append(world.launcher.warming)
        assert found == told


def test_shapes_are_kept_up_to_a_number_of_tokens(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_llama(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    monkeypatch.setattr(recorded, "EAGER_STEPS", 0)
    monkeypatch.setattr(recorded, "MAX_KEPT_TOKENS", 4)
    world = World(build_model(checkpoint.spec, WeightSource(checkpoint), Packed("exact")))
    for rows, kept in (([0], [1]), ([0, 1], [1, 2]), ([0, 1, 2], [3]), ([0], [3, 1])):
        world.step(rows)
        assert [tokens for tokens, *_ in world.launcher._programs] == kept


class World:
    """Rows that take one token a step through a launcher."""

    def __init__(self, model: Any, rows: int = 3):
        from headrace.attention.native import NativeAttention
        from models.harness import Stepper

        self.stepper = Stepper(model, rows, 128)
        self.stepper.backend = NativeAttention(16)
        self.launcher = RecordedLauncher(self._forward)

    def _forward(self, batch: Any, metas: Any) -> np.ndarray:
        stepper = self.stepper

        def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
            settings = stepper.model.attention_layers[layer]
            return stepper.backend.run(q, k, v, stepper.caches[layer], metas[0], settings)

        return stepper.model.forward(batch.token_ids, batch.positions, attend)

    def step(self, rows: list[int]) -> np.ndarray:
        from models.harness import make_batch

        stepper = self.stepper
        positions = [np.array([stepper.lengths[row]]) for row in rows]
        used = [stepper.tables[0][row][: stepper.lengths[row] // 16 + 1] for row in rows]
        ids = np.array([(7 * stepper.lengths[row] + row) % 90 for row in rows])
        batch = make_batch(positions, [used], 16, ids)
        metas = [stepper.backend.plan(batch, 0, stepper.groups[0])]
        hidden = self.launcher.run(batch, metas).copy()
        for row in rows:
            stepper.lengths[row] += 1
        return hidden


def test_what_cannot_be_replayed_is_not_recorded(path: str) -> None:
    from headrace import ops

    x = np.ones((3, 8), np.float32)
    weight = np.ones(8, np.float32)
    _, good = record(library().functions, lambda: ops.rms_norm(x, weight, 1e-5))
    assert good is not None
    _, on_a_reference = record(library().functions, lambda: ops.linear(x, x))
    assert on_a_reference is None
    _, of_another_type = record(library().functions, lambda: ops.rms_norm(x.astype(np.float64), weight, 1e-5))
    assert of_another_type is None
    _, outside = record(library().functions, lambda: ops.rms_norm(x, weight, 1e-5) + 1)
    assert outside is None
    with using():
        bind_references()
        result, on_references = record(library().functions, lambda: ops.rms_norm(x, weight, 1e-5))
    assert on_references is None
    np.testing.assert_allclose(result, 1.0, rtol=1e-4)
    x[:] = 5.0
    good.replay()  # the same arrays, now with other numbers
