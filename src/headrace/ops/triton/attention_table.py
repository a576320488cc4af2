"""Where one way of attention gives way to another: thresholds by shape of the heads, fitted ones and, by GPU, those
that a user measured with `headrace bench attention`. Read once; nothing is measured at start-up."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from headrace.ops.triton.decode import FEW_ROWS
from headrace.ops.triton.paged import HeadShape
from headrace.ops.triton.runtime import INTERPRETED, num_processors
from headrace.ops.triton.tile_table import file_name, user_folder

NEVER = 2**31 - 1


@dataclass(frozen=True)
class AttentionShape:
    """What thresholds are for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # bfloat16, float16 or float32


@dataclass(frozen=True)
class AttentionRule:
    """The thresholds of one shape."""

    alone_from: int  # tokens of a prompt without a prefix from which the library's attention is faster, copies included
    fused_rows: int  # rows of a decode step up to which rotation and cache writes belong into attention
    split_rows: int  # short spans of a step up to which their contexts are split among processors


def default_rule(shape: AttentionShape) -> AttentionRule:
    """What was fitted on an H200. Short spans are split where, unsplit, a processor would have fewer than two programs.
    Programs of wide heads that read two at a time (decode.py) have no registers left for rotation."""
    fused_rows = 64 if shape.head_dim <= 64 else FEW_ROWS
    split_rows = (2 * num_processors() - 1) // shape.num_kv_heads
    return AttentionRule(alone_from=768, fused_rows=fused_rows, split_rows=split_rows)


def attention_folder() -> Path:
    """Where `headrace bench attention` leaves what it found."""
    return user_folder().with_name("attention")


def read_rules(path: Path) -> dict[AttentionShape, AttentionRule]:
    """ValueError: the file holds something else."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["rules"]
        found = {AttentionShape(**entry["shape"]): AttentionRule(**entry["rule"]) for entry in entries}
        if any(type(value) is not int or value < 0 for rule in found.values() for value in asdict(rule).values()):
            raise ValueError("a threshold is no number of tokens or rows")
        return found
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is no table of thresholds ({error}); remove it, then run headrace bench attention again"
        ) from None


def write_rules(path: Path, gpu: str, rules: dict[AttentionShape, AttentionRule]) -> None:
    """Write a table; entries of an older one that `rules` lacks are kept."""
    whole = {**(read_rules(path) if path.exists() else {}), **rules}
    entries = [{"shape": asdict(shape), "rule": asdict(rule)} for shape, rule in whole.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"gpu": gpu, "rules": entries}, indent=1) + "\n", encoding="utf-8")


@cache
def measured_rules() -> dict[AttentionShape, AttentionRule]:
    """Those that a user measured on this process's GPU."""
    if INTERPRETED or not torch.cuda.is_available():
        return {}
    path = attention_folder() / file_name(torch.cuda.get_device_name())
    return read_rules(path) if path.exists() else {}


def attention_rule(shape: HeadShape, dtype: torch.dtype | str) -> AttentionRule:
    """The thresholds of a layer's heads and the cache's numbers: measured ones, else the fitted ones."""
    key = AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, str(dtype).removeprefix("torch."))
    return measured_rules().get(key) or default_rule(key)
