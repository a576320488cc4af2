"""Tiles that were measured to be fastest, by GPU and shape: those that are shipped, and those that a user measured with
`headrace bench tiles`. Read once, when the first product is made; nothing is measured at start-up."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headrace.ops.triton.runtime import INTERPRETED

MAX_TOKENS = 64  # of products that are always ours; of more tokens those are that the table has
WIDE_TOKENS = 256  # of products that the table has at most
SHIPPED = Path(__file__).with_name("tiles")


@dataclass(frozen=True)
class Tile:
    """How a product is cut: weight rows and inner elements of a tile, parts of the inner dimension, pipeline depth."""

    rows: int
    inner: int
    split: int
    stages: int
    warps: int = 4
    tokens: int = MAX_TOKENS  # at most; the grid's last axis has the rest


@dataclass(frozen=True)
class Product:
    """What a tile is for."""

    kind: str  # "plain"; "parts", whose taker adds up parts of the inner dimension; "gated", gate and up in one
    tokens: int  # a power of two
    rows: int  # of the weight; of a gated product of one of its halves
    inner: int


def user_folder() -> Path:
    """Where `headrace bench tiles` leaves what it found."""
    home = os.environ.get("HEADRACE_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "headrace") / "tiles"


def file_name(gpu: str) -> str:
    return re.sub(r"\W+", "_", gpu) + ".json"


def read_tiles(path: Path) -> dict[Product, Tile]:
    """ValueError: the file holds something else."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["tiles"]
        return {Product(**entry["product"]): Tile(**entry["tile"]) for entry in entries}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is no table of tiles ({error}); remove it, then run headrace bench tiles again"
        ) from None


def write_tiles(path: Path, gpu: str, tiles: dict[Product, Tile]) -> None:
    """Write a table; entries of an older one that `tiles` lacks are kept."""
    whole = {**(read_tiles(path) if path.exists() else {}), **tiles}
    entries: Iterable[dict[str, Any]] = (
        {"product": asdict(product), "tile": asdict(tile)} for product, tile in whole.items()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"gpu": gpu, "tiles": list(entries)}, indent=1) + "\n", encoding="utf-8")


@cache
def measured_tiles() -> dict[Product, Tile]:
    """Of this process's GPU; a user's come before the shipped ones."""
    if INTERPRETED or not torch.cuda.is_available():
        return {}
    name = file_name(torch.cuda.get_device_name())
    found: dict[Product, Tile] = {}
    for folder in (SHIPPED, user_folder()):
        if (folder / name).exists():
            found |= read_tiles(folder / name)
    return found
