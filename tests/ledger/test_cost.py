"""The cost model on synthetic machines whose true cost is known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from ledger_cases import FACTS, spec

from headrace.ledger.cost import FEATURES, CostModel
from headrace.ledger.work import StepWork, WorkModel

MODEL = WorkModel(
    spec(vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_layers=16, num_heads=16, head_dim=64),
    weight_bytes=500_000_000,
)


def roofline(work: StepWork) -> float:
    arithmetic = (work.flops_linear + work.flops_head) / FACTS.flops / 0.8
    return max(work.bytes_weights / FACTS.read_bandwidth / 0.9, arithmetic)


def tiled(work: StepWork) -> float:
    tiles = math.ceil(work.num_tokens / 16)
    return 0.5 * tiles * work.bytes_weights / FACTS.read_bandwidth + 1.1 * work.flops_linear / FACTS.flops


def summed(work: StepWork) -> float:
    return 1.1 * work.bytes_weights / FACTS.read_bandwidth + 1.3 * work.flops_linear / FACTS.flops


def truth(linear: Callable[[StepWork], float], work: StepWork) -> float:
    attention = 1.8 * work.bytes_kv_read / FACTS.read_bandwidth + 3 * work.flops_attention / FACTS.flops
    return 3e-4 + 25e-6 * work.num_spans + linear(work) + attention + 1e-4 * work.num_logits


def steps(rng: np.random.Generator, number: int) -> Iterator[StepWork]:
    """Decodes of 1 to 32 rows, a third of them with a chunk of prefill."""
    for _ in range(number):
        rows = int(rng.integers(1, 33))
        columns = np.zeros((4, rows), np.int32)
        columns[1], columns[2] = rng.integers(0, 2000, rows), 1
        chunk = rng.random() < 0.3
        if chunk:
            columns[2, 0] = rng.integers(16, 512)
        yield MODEL.work(columns, rows - int(chunk and rng.random() < 0.5))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("linear", [roofline, tiled, summed])
def test_converges_with_noise_and_outliers(linear: Callable[[StepWork], float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = CostModel(FACTS)
    for work in steps(rng, 800):
        seconds = truth(linear, work) * math.exp(0.03 * rng.standard_normal())
        model.observe(work, seconds * (5 if rng.random() < 0.05 else 1))
    assert model.error()[0] < 0.05
    errors = [abs(model.predict(work) / truth(linear, work) - 1) for work in steps(rng, 200)]  # without the noise
    assert np.median(errors) < 0.03 and np.quantile(errors, 0.9) < 0.08
    assert all(value >= 0 for value in model.coefficients.values())


def test_the_start_is_the_machines_roofline() -> None:
    model = CostModel(FACTS)
    for work in steps(np.random.default_rng(0), 50):
        assert 1.0 < model.predict(work) / roofline(work) < 2.5
        parts = model.breakdown(work)
        assert tuple(parts) == FEATURES and sum(parts.values()) == pytest.approx(model.predict(work))
    assert all(math.isnan(value) for value in model.error())


def test_one_pause_moves_nothing_but_a_lasting_change_is_believed() -> None:
    rng = np.random.default_rng(1)
    model = CostModel(FACTS)
    for work in steps(rng, 300):
        model.observe(work, truth(summed, work))
    probe = next(steps(rng, 1))
    before = model.predict(probe)
    for _ in range(3):
        model.observe(probe, 5 * before)
    assert model.predict(probe) == pytest.approx(before, rel=0.03)
    for work in steps(rng, 300):
        model.observe(work, 2 * truth(summed, work))  # another process took half the machine, for good
    assert model.predict(probe) == pytest.approx(2 * truth(summed, probe), rel=0.1)


def test_senseless_observations_are_ignored() -> None:
    model = CostModel(FACTS)
    work = next(steps(np.random.default_rng(0), 1))
    for seconds in (0.0, -1.0, math.nan, math.inf):
        model.observe(work, seconds)
    model.observe(StepWork(), 1.0)
    assert model.num_observed == 0
    for seconds in (1e-300, 1e300, 1.0):  # absurd, but finite
        model.observe(work, seconds)
    assert math.isfinite(model.predict(work)) and all(math.isfinite(v) for v in model.coefficients.values())
    for options in ({"tile": 0}, {"window": 0}, {"forget": 0.0}, {"forget": 1.1}):
        with pytest.raises(ValueError, match="above 0"):
            CostModel(FACTS, **options)  # type: ignore[arg-type]


def test_tiles_are_a_parameter() -> None:
    columns = np.array([[0], [0], [33], [0]], np.int32)
    work = MODEL.work(columns, 1)
    index = FEATURES.index("tile")
    weights = work.bytes_weights / FACTS.read_bandwidth
    assert CostModel(FACTS).features(work)[index] == pytest.approx(2 * weights)
    assert CostModel(FACTS, tile=32).features(work)[index] == pytest.approx(weights)
    assert CostModel(FACTS, tile=64).features(work)[index] == 0.0


def test_saved_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    model = CostModel(FACTS)
    assert not model.restore("tiny")
    work = list(steps(np.random.default_rng(2), 100))
    for step in work:
        model.observe(step, truth(summed, step))
    assert model.save("tiny")
    other = CostModel(FACTS)
    assert not other.restore("another model") and not CostModel(FACTS, tile=8).restore("tiny")
    assert other.restore("tiny")
    for step in work:
        assert other.predict(step) == model.predict(step)
        model.observe(step, truth(tiled, step))
        other.observe(step, truth(tiled, step))
    assert other.coefficients == model.coefficients


def test_bad_fits_are_not_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    model = CostModel(FACTS)
    assert model.save("tiny")
    (path,) = (tmp_path / "home" / "cost").iterdir()
    good = json.loads(path.read_text())
    start = CostModel(FACTS).coefficients
    changes = [{"coefficients": [1.0]}, {"coefficients": [-1.0] * 9}, {"normal": "x"}, {"target": None}, {"usual": {}}]
    changes += [{"features": []}, {"format": 0}, {"num_observed": -1}, {"target": [math.nan] * 9}]
    for change in changes:
        path.write_text(json.dumps({**good, **change}))
        assert not model.restore("tiny") and model.coefficients == start, change
    path.write_text("{")
    assert not model.restore("tiny")
    path.write_text(json.dumps(good))
    assert model.restore("tiny")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "file"))
    assert not model.save("tiny") and not model.restore("tiny")


def test_learning_from_several_steps_at_once_comes_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    for together in (1, 8):
        monkeypatch.setattr("headrace.ledger.cost._TOGETHER", together)
        rng, model = np.random.default_rng(3), CostModel(FACTS)
        for work in steps(rng, 600):
            model.observe(work, truth(roofline, work) * math.exp(0.02 * rng.standard_normal()))
        models.append(model)
    each, eight = models
    assert each.num_observed == eight.num_observed == 600
    for work in steps(np.random.default_rng(4), 50):
        assert eight.predict(work) == pytest.approx(each.predict(work), rel=0.02)


def test_what_waits_to_be_learnt_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.ledger.cost.cache_dir", lambda: tmp_path)
    rng, model, other = np.random.default_rng(5), CostModel(FACTS), CostModel(FACTS)
    for work in steps(rng, 101):
        model.observe(work, truth(summed, work))
    assert model._waiting and model.save("some model") and not model._waiting and other.restore("some model")
    assert other.coefficients == model.coefficients and other.num_observed == 101
