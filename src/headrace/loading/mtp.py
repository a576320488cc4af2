"""Multi-token prediction modules that a checkpoint holds beside its model, under one set of names.

    here              DeepSeek-V3, GLM: model.layers.N.   MiMo: model.mtp_layers.0.   Qwen3.5: mtp.
    enorm             enorm                               token_layernorm             pre_fc_norm_embedding
    hnorm             hnorm                               hidden_layernorm            pre_fc_norm_hidden
    eh_proj           eh_proj                             input_proj (feature first)  fc
    norm              shared_head.norm                    final_layernorm             norm
    head              shared_head.head                    - (the model's)             - (the model's)
    model.layers.0.   the rest                            the rest                    layers.0.

N is the number of the model's layers. Copies of the model's embedding are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.models.registry import LAYERS
from headrace.models.spec import ModelSpec

if TYPE_CHECKING:
    from headrace.loading.checkpoint import FolderCheckpoint

_DEEPSEEK = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm",
             "shared_head.head": "head"}  # fmt: skip
_MIMO = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm"}
_QWEN = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"}


@dataclass(frozen=True)
class _Place:
    """Where a name belongs."""

    module: int
    name: str | None  # within the module, as it is called here; None: not needed
    feature_first: bool = False


def _place(stored: str, num_layers: int) -> _Place | None:
    """None: the tensor is the model's."""
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stored):
        module = int(match[1]) - num_layers
        return None if module < 0 else _Place(module, _renamed(match[2], _DEEPSEEK))
    if match := re.fullmatch(r"model\.mtp_layers\.(\d+)\.(.+)", stored):
        return _Place(int(match[1]), _renamed(match[2], _MIMO), feature_first=True)
    if match := re.fullmatch(r"mtp\.layers\.(\d+)\.(.+)", stored):
        return _Place(int(match[1]), f"model.layers.0.{match[2]}")
    if stored.startswith("mtp."):
        return _Place(0, _renamed(stored.removeprefix("mtp."), _QWEN))
    return None


def _renamed(name: str, known: dict[str, str]) -> str | None:
    stem, _, kind = name.rpartition(".")
    if stem == "embed_tokens":
        return None
    return f"{known[stem]}.{kind}" if stem in known else f"model.layers.0.{name}"


class MtpCheckpoint:
    """The first module of a checkpoint (the `Checkpoint` protocol of layers/weights.py)."""

    def __init__(self, folder: FolderCheckpoint, places: dict[str, _Place]):
        self.path: Path = folder.path
        self.name = folder.name
        self.num_bytes = 0  # it is in the model's files
        self.num_modules = 1 + max(place.module for place in places.values())
        self.feature_first = any(place.feature_first for place in places.values())
        self.spec: ModelSpec = replace(folder.spec, num_layers=1, windows=(), local_rope=None)
        self._folder = folder
        self._stored = {place.name: stored for stored, place in places.items() if place.name and not place.module}

    @property
    def has_layer(self) -> bool:
        """Whether a layer of the model's family can be used by itself."""
        return self.spec.family in LAYERS

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._folder.shape(self._stored[name])

    def read(self, name: str) -> np.ndarray:
        return self._folder.read(self._stored[name])


def split_mtp(names: Iterable[str], num_layers: int) -> tuple[list[str], dict[str, _Place]]:
    """(names of the model's tensors, those of its modules)."""
    own: list[str] = []
    modules: dict[str, _Place] = {}
    for name in names:
        place = _place(name, num_layers)
        if place is None:
            own.append(name)
        else:
            modules[name] = place
    return own, modules
