"""How layers are grouped over the one pool of blocks: equal groups, every layer once, little memory unused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.kv_layout import KVLayout
from headrace.models.spec import ModelSpec
from headrace.resolve import kv_groups


def spec(windows: list[int | None]) -> ModelSpec:
    return ModelSpec("llama", 50, 24, 32, len(windows), 4, 2, 6, 1e-5, 128, windows=tuple(windows))


def alternating(num_layers: int, period: int) -> list[int | None]:
    return [7 if (layer + 1) % period else None for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("name", "windows", "sizes"),
    [
        ("all full", [None] * 28, [28]),
        ("all windows", [7] * 32, [32]),
        ("Gemma 2 2B, gpt-oss", alternating(26, 2), [13, 13]),
        ("Gemma 3 270M", alternating(18, 6), [3] * 6),
        ("Gemma 3 1B", alternating(26, 6), [4] * 5 + [2, 4]),
        ("Gemma 3 4B", alternating(34, 6), [5] * 5 + [4, 5]),
        ("Gemma 3 27B", alternating(62, 6), [13] * 4 + [10]),
        ("one full layer", [None] + [7] * 27, [1] + [3] * 9),
    ],
)
def test_sizes_of_known_models(name: str, windows: list[int | None], sizes: list[int]) -> None:
    assert [len(group.layers) for group in kv_groups(spec(windows))] == sizes


@given(st.lists(st.sampled_from([None, 7, 9]), min_size=1, max_size=40))
def test_every_layer_once_with_its_window_and_a_place_of_its_own(windows: list[int | None]) -> None:
    model = spec(windows)
    layout = KVLayout(kv_groups(model), block_size=16, num_blocks=8)
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(windows)))
    assert all(model.window(layer) == group.window for group in layout.groups for layer in group.layers)
    places = [layout.place(layer) for layer in range(len(windows))]
    assert len(set(places)) == len(places) and max(tensor for _, tensor in places) == layout.num_tensors - 1
    # never more memory than one group per window would take
    kinds = [windows.count(window) for window in set(windows)]
    assert len(layout.groups) * layout.num_tensors <= len(kinds) * max(kinds)
