"""Int8 weights of folders that compressed-tensors wrote: signed bytes with a scale for a matrix, an output, or some of
an output's inputs (a group).

A matrix `X.weight` [N, K] lies there as

    int-quantized, naive-quantized   X.weight int8 [N, K]
    pack-quantized                   X.weight_packed int32 [N, K / 4], four bytes q + 128 each, the lowest first;
                                     X.weight_shape [2] is (N, K)

with X.weight_scale [1], [N, 1] or [N, groups] of floats: w = q * scale. Only weights are read as integers; a scheme for
activations that the folder names beside is left out, which rounds less than it would.

Source: vllm-project/compressed-tensors, the README's description of its formats and the written files themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.loading.errors import CheckpointError
from headrace.loading.safetensors_file import SafetensorsFolder

if TYPE_CHECKING:
    from headrace.ops.native.packed import StoredTensor

METHOD = "compressed-tensors"
FORMATS = ("int-quantized", "naive-quantized", "pack-quantized")
_BLOCK = 32
_PARTS = (".weight_scale", ".weight_packed", ".weight_shape")  # of a matrix
# of activations, which stay as they are
_UNUSED = (".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".input_global_scale")


def check_scheme(config: dict[str, Any], where: Path) -> None:
    """Whether a quantization_config of compressed-tensors is one that is read here; CheckpointError lists every reason
    why it is not."""
    reasons = []
    if config.get("quantization_status", "compressed") != "compressed":
        reasons.append(f"its status is {config['quantization_status']!r}, not 'compressed'")
    if config.get("kv_cache_scheme"):
        reasons.append("it has a scheme for the KV cache (give kv_dtype instead)")
    if _record(config.get("sparsity_config")).get("format", "dense") != "dense":
        reasons.append("its weights are sparse")
    if config.get("transform_config"):
        reasons.append("its weights are rotated (transform_config)")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        reasons.append("it has no config_groups")
        groups = {}
    for name, group in groups.items():
        weights = _record(_record(group).get("weights"))
        format = _record(group).get("format") or config.get("format")
        if format not in FORMATS:
            reasons.append(f"{name} has format {format!r}, not one of {', '.join(FORMATS)}")
        elif (weights.get("type"), weights.get("num_bits")) != ("int", 8):
            reasons.append(f"{name} has weights of {weights.get('num_bits')} bits ({weights.get('type')}), not int8")
        elif not weights.get("symmetric", True):
            reasons.append(f"{name} has zero points; only symmetric weights are read")
    if reasons:
        raise CheckpointError(
            f"{where}: quantised by {METHOD} in a way that is not supported: {'; '.join(reasons)}; take the bf16 model "
            "(quantize=q8 makes it as small) or a GGUF file"
        )


def _record(value: Any) -> dict[str, Any]:
    """What should be a record, empty where it is none."""
    return value if isinstance(value, dict) else {}


class CompressedWeights:
    """The int8 matrices among a folder's tensors. Names are the file's, matrices under X.weight."""

    def __init__(self, weights: SafetensorsFolder):
        self._weights = weights
        names = set(weights.names())
        self.hidden: set[str] = {name for name in names if name.endswith(_UNUSED)}  # no tensors of the model
        self.matrices: set[str] = set()
        for name in names:
            for suffix in _PARTS:
                if name.endswith(suffix):
                    self.hidden.add(name)
                    self.matrices.add(f"{name.removesuffix(suffix)}.weight")
            if name.endswith((".weight_g_idx", ".weight_zero_point")):
                raise CheckpointError(f"{weights.folder}: {name!r}: zero points and orders of groups are not supported")
        for matrix in sorted(self.matrices):
            packed = f"{matrix}_packed" in names
            wanted = [f"{matrix}_scale", *([f"{matrix}_packed", f"{matrix}_shape"] if packed else [matrix])]
            if missing := [name for name in wanted if name not in names]:
                raise CheckpointError(f"{weights.folder}: {matrix} is quantised, and {', '.join(missing)} is missing")
        for name in names:
            if name.endswith(".weight") and name not in self.matrices and weights.dtype(name) == "I8":
                raise CheckpointError(f"{weights.folder}: {name} is int8 and has no {name}_scale")

    def shape(self, name: str) -> tuple[int, ...]:
        """[N, K] of a matrix."""
        packed = f"{name}_packed"
        stored = self._weights.shape(packed if packed in self.hidden else name)
        if len(stored) != 2:
            raise CheckpointError(f"{self._weights.folder}: {name} is quantised and {list(stored)}, which is no matrix")
        if packed not in self.hidden:
            return stored
        shape = tuple(int(size) for size in self._weights.raw(f"{name}_shape").ravel())
        rows, words = stored
        if len(shape) != 2 or shape[0] != rows or -(-shape[1] // 4) != words or self._weights.dtype(packed) != "I32":
            raise CheckpointError(f"{self._weights.folder}: {name}_shape {list(shape)} does not fit {packed}")
        return shape

    def read(self, name: str, part: slice = slice(None)) -> np.ndarray:
        """float32 [N, K], or some of its rows."""
        bytes_, scale = self._bytes(name, part), self._scale(name)[part]
        rows, inputs = bytes_.shape
        values = bytes_.astype(np.float32).reshape(rows, scale.shape[1], inputs // scale.shape[1])
        values *= scale[:, :, None]
        return values.reshape(rows, inputs)

    def read_packed(self, name: str) -> StoredTensor | None:
        """The matrix as the native kernels read it (format I8); None where groups or rows are no multiples of 32."""
        from headrace.ops.native.packed import StoredTensor

        rows, inputs = self.shape(name)
        scale = self._scale(name)
        if inputs // scale.shape[1] % _BLOCK:
            return None
        blocks = np.empty((rows, inputs // _BLOCK, 4 + _BLOCK), np.uint8)
        repeated = np.repeat(scale, inputs // _BLOCK // scale.shape[1], axis=1)
        blocks[:, :, :4] = repeated[:, :, None].view(np.uint8)
        blocks[:, :, 4:] = self._bytes(name).view(np.uint8).reshape(rows, -1, _BLOCK)
        return StoredTensor("I8", blocks.reshape(rows, -1), None)

    def _bytes(self, name: str, part: slice = slice(None)) -> np.ndarray:
        """int8 [N, K], or some of its rows; nothing else is converted."""
        inputs = self.shape(name)[1]
        if f"{name}_packed" in self.hidden:
            packed = np.ascontiguousarray(self._weights.raw(f"{name}_packed")).view(np.uint8)
            return (packed[part, :inputs] ^ 0x80).view(np.int8)
        if self._weights.dtype(name) != "I8":
            raise CheckpointError(
                f"{self._weights.folder}: {name} has a scale and is {self._weights.dtype(name)}, not I8"
            )
        return self._weights.raw(name)[part]

    def _scale(self, name: str) -> np.ndarray:
        """float32 [N, groups]."""
        rows, inputs = self.shape(name)
        scale = self._weights.read(f"{name}_scale")
        if scale.size == 1:
            return np.full((rows, 1), scale.ravel()[0], np.float32)
        groups = scale.size // rows if rows else 1
        if not groups or scale.size != rows * groups or scale.shape[0] != rows or inputs % groups:
            raise CheckpointError(
                f"{self._weights.folder}: {name}_scale {list(scale.shape)} does not fit {[rows, inputs]}"
            )
        return scale.reshape(rows, groups)
