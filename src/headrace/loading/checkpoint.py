"""open_checkpoint: a GGUF file or a Hugging Face folder as one kind of thing, tensors under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.loading.compressed import METHOD, CompressedWeights, check_scheme
from headrace.loading.errors import CheckpointError
from headrace.loading.json_file import read_json
from headrace.loading.mtp import MtpCheckpoint, split_mtp
from headrace.loading.names import hf_name, text_name
from headrace.loading.safetensors_file import SafetensorsFolder
from headrace.loading.store import repair_of
from headrace.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from headrace.frontend.tokenizer import Tokenizer
    from headrace.loading.gguf_file import GGUFFile
    from headrace.ops.native.packed import StoredTensor

DUMMY = "dummy:"
GENERATION_KEYS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_new_tokens",
)
GGUF_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
MXFP4_REMEDY = (
    "its experts are quantised as MXFP4, which is not supported yet; convert it to bf16 first: load it in transformers "
    "with quantization_config=Mxfp4Config(dequantize=True) and save_pretrained"
)
HEAD = "lm_head.weight"


class LoadedCheckpoint:
    """A model on disk: its spec, its tensors (the `Checkpoint` protocol of layers/weights.py) and its text side.

    `generation` holds the sampling defaults its makers recommend, under the names of generation_config.json, only
    those they gave. A tied output matrix is not among `names`, whatever the file holds.
    """

    spec: ModelSpec
    mtp: MtpCheckpoint | None = None  # a module for multi-token prediction that it holds too
    mask_token: int | None = None  # of a model tuned to guess several tokens at once, which stands for those
    path: Path
    name: str
    num_bytes: int  # of the weight files
    chat_template: str | None
    generation: dict[str, Any]

    def names(self) -> Iterable[str]:
        """Every tensor of the model."""
        raise NotImplementedError

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; linear weights are [out, in]."""
        raise NotImplementedError

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32, perhaps read-only; CheckpointError if it is damaged."""
        raise NotImplementedError

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built anew; CheckpointError if it has none that is supported."""
        raise NotImplementedError


def open_checkpoint(path: str | Path, *, seed: int = 0) -> LoadedCheckpoint:
    """Open a .gguf file, a folder with config.json, or a folder with exactly one .gguf.

    `dummy:PATH` takes only the config at PATH (config.json or its folder) and makes up the weights from `seed`.
    Raises CheckpointError.
    """
    if str(path).startswith(DUMMY):
        return DummyModel(Path(str(path)[len(DUMMY) :]), seed)
    path = Path(path)
    if path.is_file():
        try:
            return GGUFCheckpoint(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{repair_of(path)}") from None
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such file or folder")
    if (path / "config.json").is_file():
        return FolderCheckpoint(path)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return GGUFCheckpoint(found[0])
    if found:
        raise CheckpointError(f"{path}: holds {len(found)} GGUF files; name one, such as {found[0]}")
    raise CheckpointError(f"{path}: holds neither config.json nor a .gguf file")


class GGUFCheckpoint(LoadedCheckpoint):
    """A GGUF file. llama.cpp interleaves the rows of Q and K of its llama models; they are put back here."""

    def __init__(self, path: Path):
        from headrace.frontend.tokenizer import gguf_chat_templates
        from headrace.loading.gguf_file import GGUFFile
        from headrace.loading.gguf_spec import ROPE_TENSORS, spec_from_gguf

        self.file: GGUFFile = GGUFFile(path)
        if self.file.metadata.get("split.count", 1) != 1:
            raise CheckpointError(f"{path}: is one part of several; join them first (llama-gguf-split --merge)")
        self.spec = spec_from_gguf(self.file)
        self.path = path
        self.name = path.stem
        self.num_bytes = self.file.num_bytes
        self.chat_template = gguf_chat_templates(self.file).get("default")
        self.generation = {
            ours: value
            for key, ours in GGUF_SAMPLING.items()
            if (value := self.file.metadata.get(f"general.sampling.{key}")) is not None
        }
        self._stored = {hf_name(name, self.spec.family): name for name in self.file.tensors if name not in ROPE_TENSORS}

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.info(self._stored_name(name)).shape

    def read(self, name: str) -> np.ndarray:
        values = self.file.read(self._stored_name(name))
        order = self.row_order(name)
        return values if order is None else values[order]

    def read_rows(self, name: str, first: int, target: torch.Tensor) -> None:
        """Write rows of the tensor, from `first` on, into `target` [N, K]; a row is the last dimension."""
        from torch import from_numpy

        order, last = self.row_order(name), first + target.shape[0]
        rows = slice(first, last) if order is None else order[first:last]
        values = self.file.read_rows(self._stored_name(name), rows)
        target.copy_(from_numpy(values if values.flags.writeable else values.copy()))

    def read_packed(self, name: str) -> StoredTensor | None:
        """The matrix, or stacked ones one below the other, as the file has them; None if the native kernels do not read
        the type."""
        from headrace.ops.native.packed import FORMATS, StoredTensor

        info = self.file.info(self._stored_name(name))
        if info.type.name not in FORMATS or len(info.shape) not in (2, 3):
            return None
        release = partial(self.file.release, info.name)
        return StoredTensor(info.type.name, self.file.raw(info.name), self.row_order(name), release)

    def row_order(self, name: str) -> np.ndarray | None:
        """Stored rows in Hugging Face's order, int64 [rows]; None if they are in it.

        llama.cpp stores each head's halves interleaved (row 2i and 2i+1 are rotated together); Hugging Face keeps the
        first halves of all pairs, then the second (row i and i + head_dim/2).
        """
        if self.spec.family not in ("llama", "mixtral") or ".self_attn." not in name:
            return None
        if not name.endswith((".q_proj.weight", ".k_proj.weight", ".q_proj.bias", ".k_proj.bias")):
            return None
        rows, dim = self.shape(name)[0], self.spec.head_dim
        if rows % dim:
            return None  # misshapen: the layer that takes it says so
        return np.arange(rows).reshape(rows // dim, dim // 2, 2).swapaxes(1, 2).ravel()

    def tokenizer(self) -> Tokenizer:
        from headrace.frontend.tokenizer import Tokenizer

        return Tokenizer.from_gguf(self.file)

    def _stored_name(self, name: str) -> str:
        if name not in self._stored:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        return self._stored[name]


class FolderCheckpoint(LoadedCheckpoint):
    """A Hugging Face folder: config.json, safetensors, tokenizer.json."""

    def __init__(self, path: Path):
        from headrace.frontend.tokenizer import read_chat_templates
        from headrace.loading.hf_config import spec_from_config

        self.path = path
        self.name = path.resolve().name
        config = read_json(path / "config.json")
        generation = read_json(path / "generation_config.json", missing_ok=True)
        compressed = _is_compressed(config.get("quantization_config"), path)
        self.spec = spec_from_config(config, where=str(path / "config.json"), eos=_eos_ids(path, generation))
        self._weights = SafetensorsFolder(path)
        self.num_bytes = self._weights.num_bytes
        self.chat_template = read_chat_templates(path).get("default")
        self.generation = {key: generation[key] for key in GENERATION_KEYS if generation.get(key) is not None}
        self._int8 = CompressedWeights(self._weights) if compressed else None
        tied = self.spec.tie_word_embeddings
        names = set(self._weights.names())
        if self._int8 is not None:
            names = (names - self._int8.hidden) | self._int8.matrices
        self.mask_token = _mask_token(config, path)
        own, modules = split_mtp(sorted(names), self.spec.num_layers)
        self.mtp = MtpCheckpoint(self, modules) if modules else None
        named = ((text_name(stored), stored) for stored in own)
        self._stored = {
            name: stored
            for name, stored in named
            if name is not None and not name.endswith("rotary_emb.inv_freq") and not (tied and name == HEAD)
        }
        if not tied and HEAD not in self._stored:
            raise CheckpointError(f"{path}: {HEAD} is missing and config.json does not tie it to the embedding")

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._home(name).shape(self._stored.get(name, name))

    def read(self, name: str) -> np.ndarray:
        return self._home(name).read(self._stored.get(name, name))

    def read_packed(self, name: str) -> StoredTensor | None:
        """A matrix of int8 weights as the native kernels read it; None for others."""
        home = self._home(name)
        return home.read_packed(self._stored[name]) if isinstance(home, CompressedWeights) else None

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Write the tensor into one of a GPU's."""
        home = self._home(name)
        if isinstance(home, SafetensorsFolder):
            home.fill(self._stored.get(name, name), target)
        else:
            from torch import from_numpy

            target.copy_(from_numpy(home.read(self._stored[name])))

    def read_rows(self, name: str, first: int, target: torch.Tensor) -> None:
        """Write rows of the tensor, from `first` on, into `target` [N, K]; a row is the last dimension."""
        home = self._home(name)
        if isinstance(home, SafetensorsFolder):
            home.read_rows(self._stored.get(name, name), first, target)
        else:
            from torch import from_numpy

            target.copy_(from_numpy(home.read(self._stored[name], slice(first, first + target.shape[0]))))

    def _home(self, name: str) -> SafetensorsFolder | CompressedWeights:
        """What reads a tensor."""
        quantised = self._int8 is not None and self._stored.get(name, name) in self._int8.matrices
        return self._int8 if self._int8 is not None and quantised else self._weights

    def tokenizer(self) -> Tokenizer:
        from headrace.frontend.tokenizer import Tokenizer

        return Tokenizer.from_folder(self.path)


class DummyModel(LoadedCheckpoint):
    """A config with made-up weights; the tokenizer is the folder's, if it has one."""

    def __init__(self, path: Path, seed: int):
        from headrace.frontend.tokenizer import read_chat_templates
        from headrace.loading.dummy import DummyCheckpoint
        from headrace.loading.hf_config import read_config

        config = path / "config.json" if path.is_dir() else path
        self.path = config
        self.name = f"dummy-{config.resolve().parent.name}"
        self.spec = read_config(config)
        self._weights = DummyCheckpoint(self.spec, seed)
        self.num_bytes = 4 * sum(int(np.prod(self.shape(name))) for name in self.names())
        self.chat_template = read_chat_templates(config.parent).get("default")
        self.generation = {}

    def names(self) -> Iterable[str]:
        return self._weights.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def read(self, name: str) -> np.ndarray:
        return self._weights.read(name)

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Write the tensor into one of a GPU's."""
        self._weights.fill(name, target)

    def tokenizer(self) -> Tokenizer:
        from headrace.frontend.tokenizer import Tokenizer

        return Tokenizer.from_folder(self.path.parent)


def _mask_token(config: dict[str, Any], path: Path) -> int | None:
    """As PARD's authors name it, or others."""
    for key in ("pard_token", "ptd_token_id"):
        if (value := config.get(key)) is not None:
            if type(value) is not int:
                raise CheckpointError(f"{path}: {key} must be a token id, not {value!r}")
            return value
    return None


def _is_compressed(config: Any, path: Path) -> bool:
    """Whether a quantization_config is one of compressed-tensors; CheckpointError for what is not supported."""
    if not config:
        return False
    method = config.get("quant_method", "unknown") if isinstance(config, dict) else config
    if method == "mxfp4":
        raise CheckpointError(f"{path}: {MXFP4_REMEDY}")
    if method != METHOD:
        raise CheckpointError(f"{path}: quantised with {method!r}, which is not supported yet")
    check_scheme(config, path)
    return True


def _eos_ids(path: Path, generation: dict[str, Any]) -> set[int]:
    """End-of-sequence ids outside config.json: generation_config's, and the tokenizer's eos_token."""
    from headrace.loading.hf_config import token_ids

    found = set(token_ids(generation.get("eos_token_id")))
    config = read_json(path / "tokenizer_config.json", missing_ok=True)
    eos = config.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(eos, str):
        return found
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict):
        for id, token in listed.items():
            if isinstance(token, dict) and token.get("content") == eos and str(id).isdigit():
                return found | {int(id)}
    tokenizer = read_json(path / "tokenizer.json", missing_ok=True)
    for token in tokenizer.get("added_tokens") or ():
        if token.get("content") == eos:
            return found | {int(token["id"])}
    vocab = (tokenizer.get("model") or {}).get("vocab")
    return found | {vocab[eos]} if isinstance(vocab, dict) and isinstance(vocab.get(eos), int) else found
