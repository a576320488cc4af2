"""Tables of measured tiles: read, merged, taken by products, and made by `headrace bench tiles`."""

import json
from dataclasses import replace

import pytest
import torch

from headrace import ops
from headrace.bench import tiles
from headrace.cli.main import main
from headrace.ops.triton import skinny, tile_table
from headrace.ops.triton.runtime import INTERPRETED
from headrace.ops.triton.tile_table import Product, Tile, read_tiles, write_tiles
from headrace.quant.dense import DenseLinear, DenseMatrix

SHAPE = Product("parts", 16, 96, 128)


def test_what_is_written_is_read_and_older_entries_stay(tmp_path):
    path, other = tmp_path / "tiles" / "gpu.json", Product("gated", 32, 64, 64)
    write_tiles(path, "a GPU", {SHAPE: Tile(64, 64, 2, 4), other: Tile(64, 32, 1, 3)})
    write_tiles(path, "a GPU", {SHAPE: Tile(64, 128, 1, 4)})
    assert read_tiles(path) == {SHAPE: Tile(64, 128, 1, 4), other: Tile(64, 32, 1, 3)}


@pytest.mark.parametrize("text", ["", "[]", '{"tiles": [{"product": {}}]}', '{"tiles": 3}'])
def test_a_damaged_table_is_named(tmp_path, text):
    path = tmp_path / "gpu.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"gpu\.json is no table of tiles"):
        read_tiles(path)


def test_shipped_tables_are_whole():
    files = list(tile_table.SHIPPED.glob("*.json"))
    assert files
    for path in files:
        assert path.name == tile_table.file_name(json.loads(path.read_text())["gpu"])
        for product, tile in read_tiles(path).items():
            assert product.inner % (tile.inner * tile.split) == 0


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the table is this GPU's")
def test_products_take_what_was_measured(monkeypatch):
    tile = Tile(128, 64, 1, 5)
    gated = Product("gated", 16, 96, 128)
    for function in (skinny.choose_tile, skinny.choose_gated_tile):
        function.cache_clear()
    monkeypatch.setattr(skinny, "INTERPRETED", False)
    monkeypatch.setattr(skinny, "measured_tiles", lambda: {SHAPE: tile, gated: tile})
    try:
        assert skinny.choose_tile(16, 96, 128, True) == tile
        assert skinny.choose_tile(16, 96, 128, False) != tile, "of plain products nothing was measured"
        assert skinny.choose_gated_tile(16, 96, 128) == tile
    finally:
        for function in (skinny.choose_tile, skinny.choose_gated_tile):
            function.cache_clear()


def test_every_candidate_computes_the_product(device, monkeypatch):
    asked = []
    monkeypatch.setattr(
        tiles, "microseconds", lambda body, launches, runs, device: asked.append(body) or 100.0 - len(asked)
    )
    monkeypatch.setattr(tiles, "_RING_BYTES", 1 << 16)
    found = tiles.measure(SHAPE, device)
    assert len(asked) == 1 + len(list(tiles.candidates(SHAPE))) > 5
    assert found.before == 99.0 and found.best == 100.0 - len(asked) and found.tile == list(tiles.candidates(SHAPE))[-1]
    if not INTERPRETED:  # the interpreter multiplies bfloat16 as if it were integers
        x, weight = torch.randn(16, 128, device=device), torch.randn(96, 128, device=device)
        for tile in tiles.candidates(SHAPE):
            out = skinny.skinny_linear(x.bfloat16(), weight.bfloat16(), None, torch.bfloat16, True, tile)
            out = out.sum(0) if out.ndim == 3 else out
            torch.testing.assert_close(out.float(), x @ weight.T, rtol=3e-2, atol=0.5)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the table is this GPU's")
@pytest.mark.parametrize("tokens", [65, 128])
def test_many_tokens_are_multiplied_by_a_tile_that_was_measured(device, tokens, monkeypatch):
    tile = Tile(64, 64, 2, 4, 4, 128)
    parts, plain = Product("parts", 128, 96, 128), Product("plain", 128, 96, 128)
    gated = Product("gated", 128, 96, 128)
    table = {parts: tile, plain: replace(tile, split=1), gated: replace(tile, split=1)}
    skinny.wide_tile.cache_clear()
    monkeypatch.setattr(skinny, "measured_tiles", lambda: table)
    method = DenseLinear(device, torch.float16)
    x = torch.randn(tokens, 128, device=device).half()
    weight, both = torch.randn(96, 128, device=device).half(), torch.randn(192, 128, device=device).half()
    try:
        made = method.apply_partial(DenseMatrix(weight), x, None)
        assert made.shape == (2, tokens, 96)
        torch.testing.assert_close(made.sum(0), x.float() @ weight.float().T, rtol=1e-3, atol=0.05)
        whole = method.apply(DenseMatrix(weight), x, None)
        torch.testing.assert_close(whole.float(), x.float() @ weight.float().T, rtol=1e-2, atol=0.1)
        gate, up = (x.float() @ both.float().T).chunk(2, dim=1)
        activated = method.apply_gated(DenseMatrix(both), x, None, ops.silu_mul)
        torch.testing.assert_close(activated.float(), torch.nn.functional.silu(gate) * up, rtol=1e-2, atol=0.5)
        assert skinny.wide_tile(64, 96, 128, "parts") is None and skinny.wide_tile(129, 96, 128, "parts") is None
    finally:
        skinny.wide_tile.cache_clear()


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU here")
def test_without_a_gpu_the_command_says_so(capsys):
    assert main(["bench", "tiles"]) == 2
    assert "tiles are measured on a GPU" in capsys.readouterr().err
