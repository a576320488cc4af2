"""Int8 weights as compressed-tensors writes them: the same numbers in every layout, packed in the engine, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.loading.checkpoint import FolderCheckpoint, open_checkpoint
from headrace.loading.errors import CheckpointError
from headrace.ops.native.library import available
from tiny import write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LAYOUTS = ["int-quantized", "pack-quantized"]
STRATEGIES: dict[str, int | None] = {"tensor": None, "channel": None, "group 32": 32, "group 16": 16}


def scheme(format: str, strategy: str = "channel", **weights: Any) -> dict[str, Any]:
    kind, _, size = strategy.partition(" ")
    own = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": kind, "group_size": int(size) if size else None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": own | weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


def quantised(values: np.ndarray, strategy: str) -> tuple[np.ndarray, np.ndarray]:
    """(int8 [N, K], scale float16 as the strategy shapes it)"""
    rows, inputs = values.shape
    size = STRATEGIES[strategy] or inputs
    parts = values.reshape(rows, -1, size)
    scale = np.abs(parts).max(-1, keepdims=True) / 127
    if strategy == "tensor":
        scale[:] = scale.max()
    scale = scale.astype(np.float16)
    q = np.clip(np.rint(parts / scale.astype(np.float32)), -128, 127).astype(np.int8)
    return q.reshape(rows, inputs), scale[0, 0] if strategy == "tensor" else scale[:, :, 0]


def write(folder: Path, format: str, strategy: str) -> tuple[Path, dict[str, np.ndarray]]:
    """A tiny model with int8 layers; (its folder, the float32 matrices that it stands for)."""
    write_tiny_llama(folder, hidden=64, inner=96, dim=16)
    tensors, made, floats = load_file(folder / "model.safetensors"), {}, {}
    for name, values in tensors.items():
        if not name.endswith("_proj.weight"):
            made[name] = values
            continue
        q, scale = quantised(values.astype(np.float32), strategy)
        wide = scale.astype(np.float32) if strategy == "tensor" else np.repeat(scale, q.shape[1] // scale.shape[1], 1)
        floats[name] = q.astype(np.float32) * wide.astype(np.float32)
        made[f"{name}_scale"] = np.atleast_1d(scale)
        if format == "pack-quantized":
            made[f"{name}_packed"] = (q.view(np.uint8) ^ 0x80).view(np.int32)
            made[f"{name}_shape"] = np.array(q.shape, np.int64)
        else:
            made[name] = q
    save_file(made, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": scheme(format, strategy)}))
    return folder, floats


@pytest.mark.parametrize("format", LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_numbers_that_the_file_stands_for(tmp_path: Path, format: str, strategy: str) -> None:
    folder, floats = write(tmp_path, format, strategy)
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, FolderCheckpoint)
    assert set(floats) < set(checkpoint.names()) and not [name for name in checkpoint.names() if "_scale" in name]
    for name, expected in floats.items():
        assert checkpoint.shape(name) == expected.shape
        np.testing.assert_array_equal(checkpoint.read(name), expected)
        target = torch.empty(expected.shape)
        checkpoint.fill(name, target)  # where the engine's weights are dense tensors
        np.testing.assert_array_equal(target.numpy(), expected)
        stored = checkpoint.read_packed(name)
        if strategy == "group 16":
            assert stored is None
            continue
        assert stored is not None and stored.format == "I8"
        if available():
            from headrace.ops.native.packed import Arena, pack

            np.testing.assert_array_equal(pack([stored], expected.shape[1], Arena()).dequantize(), expected)
    assert checkpoint.read_packed("model.embed_tokens.weight") is None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_engine_answers_as_from_the_floats(tmp_path: Path, strategy: str) -> None:
    packed, floats = write(tmp_path / "packed", "pack-quantized", strategy)
    plain, _ = write(tmp_path / "bytes", "int-quantized", strategy)
    wide = Path(shutil.copytree(plain, tmp_path / "wide"))
    tensors = {k: v for k, v in load_file(wide / "model.safetensors").items() if not k.endswith("_scale")}
    save_file(tensors | floats, wide / "model.safetensors")
    config = json.loads((wide / "config.json").read_text())
    del config["quantization_config"]
    (wide / "config.json").write_text(json.dumps(config))
    answers, bytes_read = {}, {}
    for folder in (packed, plain, wide):
        with LLM(str(folder), mode="exact") as llm:
            answers[folder] = [each.outputs[0].token_ids for each in llm.generate([[5, 9, 3], [7] * 20], GREEDY)]
            bytes_read[folder] = llm.engine.ledger.records(1)[0].work.bytes_weights
    assert answers[packed] == answers[plain] == answers[wide]
    if available() and strategy != "group 16":
        assert bytes_read[packed] == bytes_read[plain] < 0.7 * bytes_read[wide]
    with LLM(str(packed)) as llm:  # sixteen-bit inputs
        assert [each.outputs[0].token_ids for each in llm.generate([[5, 9, 3], [7] * 20], GREEDY)] == answers[wide]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "float-quantized"}, "group_0 has format 'float-quantized', not one of int-quantized"),
        ({"quantization_status": "frozen"}, "its status is 'frozen'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "give kv_dtype instead"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "its weights are sparse"),
        (
            {"sparsity_config": "none", "config_groups": {"group_0": {"weights": [8]}}},
            "group_0 has weights of None bits",
        ),
        ({"transform_config": {"config_groups": {}}, "config_groups": {}}, "are rotated .*; it has no config_groups"),
        (scheme("pack-quantized", num_bits=4), "group_0 has weights of 4 bits"),
        (scheme("int-quantized", symmetric=False), "only symmetric weights are read"),
    ],
)
def test_other_schemes_are_refused_with_every_reason(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    folder, _ = write(tmp_path, "int-quantized", "channel")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(folder)


def test_damaged_files(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "pack-quantized", "channel")
    name = "model.layers.0.mlp.down_proj.weight"
    good = load_file(folder / "model.safetensors")

    def opened(**changes: np.ndarray | None) -> FolderCheckpoint:
        tensors = {k: v for k, v in {**good, **{name + k: v for k, v in changes.items()}}.items() if v is not None}
        save_file(tensors, folder / "model.safetensors")
        return FolderCheckpoint(folder)

    with pytest.raises(CheckpointError, match=r"down_proj.weight is quantised, and .*weight_scale is missing"):
        opened(_scale=None)
    with pytest.raises(CheckpointError, match=r"weight_shape \[64, 512\] does not fit"):
        opened(_shape=np.array([64, 512])).shape(name)
    with pytest.raises(CheckpointError, match=r"weight_scale \[63, 1\] does not fit \[64, 96\]"):
        opened(_scale=np.ones((63, 1), np.float16)).read(name)
    with pytest.raises(CheckpointError, match=r"weight_scale \[64, 0\] does not fit \[64, 96\]"):
        opened(_scale=np.ones((64, 0), np.float16)).read(name)
    with pytest.raises(CheckpointError, match=r"down_proj.weight is quantised and \[1536\], which is no matrix"):
        opened(_packed=good[f"{name}_packed"].ravel()).shape(name)
    with pytest.raises(CheckpointError, match="zero points and orders of groups are not supported"):
        opened(_g_idx=np.zeros(96, np.int32))
    with pytest.raises(CheckpointError, match=r"lm_head.weight is int8 and has no lm_head.weight_scale"):
        good["lm_head.weight"] = np.zeros((4, 64), np.int8)
        opened()


@pytest.mark.skipif(not available(), reason="needs the native kernels")
def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, "int-quantized", "channel")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale"][3] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"up_proj.weight: holds values that are not finite"):
        LLM(str(folder))
