"""Folders with draft heads: config.json and safetensors as the authors of EAGLE, Medusa and MLP speculators, or
`speculators`, publish them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.loading.compressed import METHOD, CompressedWeights, check_scheme
from headrace.loading.errors import CheckpointError
from headrace.loading.hf_config import spec_from_config
from headrace.loading.hf_families import Reader
from headrace.loading.json_file import read_json
from headrace.loading.safetensors_file import SafetensorsFolder
from headrace.models.spec import ModelSpec


class _Renamed:
    """Tensors on disk (the `Checkpoint` protocol of layers/weights.py), their names without a leading `prefix`."""

    def __init__(self, path: Path, weights: SafetensorsFolder, prefix: str, int8: CompressedWeights | None = None):
        """`int8`: the matrices that the file holds as bytes with scales."""
        self.path = path
        self.name = path.resolve().name
        self.num_bytes = weights.num_bytes
        self._weights = weights
        self._int8 = int8
        names = set(weights.names())
        if int8 is not None:
            names = (names - int8.hidden) | int8.matrices
        self._stored = {name.removeprefix(prefix): name for name in sorted(names)}

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._home(name).shape(self._stored[name])

    def read(self, name: str) -> np.ndarray:
        return self._home(name).read(self._stored[name])

    def _home(self, name: str) -> SafetensorsFolder | CompressedWeights:
        """What reads a tensor."""
        if self._int8 is not None and self._stored[name] in self._int8.matrices:
            return self._int8
        return self._weights


class HeadCheckpoint(_Renamed):
    """An EAGLE head on disk, its names without a leading "model."."""

    def __init__(self, path: Path):
        config = read_json(path / "config.json")
        inner = config.get("transformer_layer_config", config)  # as `speculators` nests it
        if not isinstance(inner, dict):
            raise CheckpointError(f"{path}: transformer_layer_config must be an object")
        weights = SafetensorsFolder(path)
        super().__init__(path, weights, "model.", _int8_of(config, path, weights))
        plain = {key: value for key, value in inner.items() if key not in ("architectures", "model_type", "auto_map")}
        spec = spec_from_config(
            {**plain, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}, where=str(path / "config.json")
        )
        biased = any(name.endswith("self_attn.q_proj.bias") for name in self._stored)
        self.spec: ModelSpec = replace(spec, num_layers=1, windows=(), qkv_bias=biased, output_bias=False)
        self.is_eagle3 = any(name.endswith(".hidden_norm.weight") for name in self._stored)
        self.taps = _taps(config)
        self.draft_vocab = spec.vocab_size
        if "lm_head.weight" in self._stored:
            shape = self.shape("lm_head.weight")
            if len(shape) != 2 or not shape[0]:
                raise CheckpointError(f"{path}: lm_head.weight must have a row for each draft token, not {list(shape)}")
            self.draft_vocab = shape[0]
        deeper = sorted(
            name for name in self._stored if name.startswith("layers.") and not name.startswith("layers.0.")
        )
        if deeper:
            raise CheckpointError(f"{path}: heads of more than one layer are not supported (it has {deeper[0]})")
        if "fc.weight" not in self._stored and not (self.is_eagle3 and self.taps == ()):
            raise CheckpointError(f"{path}: is no EAGLE head: it has no tensor fc.weight")


class MlpCheckpoint(_Renamed):
    """An MLP speculator on disk, names without "speculator."."""

    def __init__(self, path: Path):
        super().__init__(path, SafetensorsFolder(path), "speculator.")
        where = str(path / "config.json")
        read = Reader(read_json(path / "config.json"), where)
        self.num_heads = read.integer("n_predict")
        self.state_size = read.integer("emb_dim")
        self.inner_size = self.state_size if read.values.get("inner_dim") == 0 else read.integer("inner_dim")
        self.vocab_size = read.integer("vocab_size")
        self.scale_input = read.flag("scale_input", False)


MEDUSA_FILE = "medusa_lm_head.safetensors"
_MOST_RANKS = 32


class MedusaCheckpoint(_Renamed):
    """Medusa heads on disk, names without "medusa_head."."""

    def __init__(self, path: Path):
        super().__init__(path, SafetensorsFolder(path, MEDUSA_FILE), "medusa_head.")
        heads = {name.split(".")[0] for name in self._stored if name != "d2t"}
        blocks = {name.split(".")[1] for name in self._stored if name.endswith(".linear.weight")}
        self.num_heads, self.num_blocks = len(heads), len(blocks)
        scores = f"0.{self.num_blocks}.weight"
        if scores not in self._stored:
            raise CheckpointError(f"{path}: holds no Medusa heads: it has no tensor {scores}")
        self.draft_vocab = self.shape(scores)[0] if "d2t" in self._stored else None
        config = read_json(path / "config.json", missing_ok=True)
        for key, found in (("medusa_num_heads", self.num_heads), ("medusa_num_layers", self.num_blocks)):
            if key in config and config[key] != found:
                raise CheckpointError(f"{path}: config.json says {key} {config[key]!r}, the file has {found}")
        self.paths = _choices(config.get("medusa_choices"), path, self.num_heads)


def _choices(given: Any, path: Path, num_heads: int) -> tuple[tuple[int, ...], ...]:
    """Paths of a candidate tree of fixed shape, as lists of ranks; (): none are given."""
    if given is None:
        return ()
    if not isinstance(given, list) or not all(
        isinstance(each, list)
        and 0 < len(each) <= num_heads
        and all(isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < _MOST_RANKS for rank in each)
        for each in given
    ):
        raise CheckpointError(
            f"{path}: medusa_choices in config.json must be lists of 1 to {num_heads} ranks from 0 to {_MOST_RANKS - 1}"
        )
    return tuple(tuple(each) for each in given)


def is_medusa(path: Path) -> bool:
    """Whether the folder holds Medusa heads."""
    return (path / MEDUSA_FILE).is_file()


def is_mlp(path: Path) -> bool:
    """Whether the folder holds an MLP speculator."""
    if not (path / "config.json").is_file():
        return False
    config = read_json(path / "config.json")
    return config.get("model_type") == "mlp_speculator" or config.get("architectures") == [
        "MLPSpeculatorPreTrainedModel"
    ]


def is_head(path: Path) -> bool:
    """Whether the folder holds an EAGLE head rather than a model."""
    if not (path / "config.json").is_file():
        return False
    config = read_json(path / "config.json")
    given = config.get("architectures")
    names = [str(name) for name in given] if isinstance(given, list) else []
    if "speculators_model_type" in config or any("eagle" in name.lower() for name in names):
        return True
    # EAGLE-1's authors name the architecture of the model it is for
    return any(path.glob("*.safetensors")) and any(
        name.removeprefix("model.") == "fc.weight" for name in SafetensorsFolder(path).names()
    )


def _int8_of(config: dict[str, Any], path: Path, weights: SafetensorsFolder) -> CompressedWeights | None:
    """The int8 matrices of a head whose config.json has a quantization_config; CheckpointError for other schemes."""
    scheme = config.get("quantization_config")
    if not scheme:
        return None
    if not isinstance(scheme, dict) or scheme.get("quant_method") != METHOD:
        raise CheckpointError(
            f"{path}: heads are read in floats, or in int8 as {METHOD} writes it, and in no other way"
        )
    check_scheme(scheme, path)
    return CompressedWeights(weights)


def _taps(config: dict[str, Any]) -> tuple[int, ...] | None:
    """Layers whose features the head takes; (): the last hidden state; None: it does not say."""
    given = config.get("eagle_aux_hidden_state_layer_ids")
    nested = config.get("eagle_config")
    if isinstance(nested, dict) and nested.get("use_aux_hidden_state") is False:
        return ()
    if given is None and isinstance(nested, dict):
        given = nested.get("eagle_aux_hidden_state_layer_ids")
    if given is None:
        return None
    if not isinstance(given, list) or not given or not all(type(each) is int for each in given):
        raise CheckpointError("eagle_aux_hidden_state_layer_ids must list layers")
    return tuple(given)
