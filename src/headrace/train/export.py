"""Heads as folders that the engine reads (loading/draft_heads.py)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from headrace.loading.draft_heads import MEDUSA_FILE
from headrace.models.spec import ModelSpec
from headrace.train.drafters import Drafter, EagleDrafter

_GROUP = 64  # weights that share a scale


def export(
    drafter: Drafter,
    folder: Path,
    spec: ModelSpec,
    draft_ids: np.ndarray,
    facts: dict[str, Any],
    int8: bool = False,
) -> None:
    """Write the heads in bfloat16 (an EAGLE head's matrices in int8 if asked for), their config.json, and `facts` of
    their training as training.json. Files are whole or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in drafter.state_dict().items()}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if len(draft_ids) < spec.vocab_size:
        tensors["d2t"] = torch.from_numpy(draft_ids - np.arange(len(draft_ids)))
    eagle = isinstance(drafter, EagleDrafter)
    config = _eagle_config(drafter, spec, len(draft_ids)) if eagle else _medusa_config(drafter, len(draft_ids))
    if int8:
        tensors, config = rounded(tensors, config)
    weights = folder / ("model.safetensors" if eagle else MEDUSA_FILE)
    unfinished = folder / "unfinished"
    unfinished.write_bytes(save(tensors, {"format": "pt"}))
    os.replace(unfinished, weights)
    write_json(folder / "config.json", config)
    write_json(folder / "training.json", facts)


def rounded(tensors: dict[str, Tensor], config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A head's tensors with its matrices in int8, _GROUP weights of an output to a float16 scale, and its config.json,
    in the layout of compressed-tensors (loading/compressed.py). Half the bytes; what the engine reads by default is
    rounded to 8 bits in any case."""
    made = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or tensor.shape[1] % _GROUP:
            made[name] = tensor
            continue
        groups = tensor.float().reshape(len(tensor), -1, _GROUP)
        scale = (groups.abs().amax(-1) / 127).clamp(min=2.0**-24).half()  # float16's least: of zeros
        bytes_ = torch.round(groups / scale.float()[..., None]).clamp(-127, 127)
        made[name] = bytes_.to(torch.int8).reshape(tensor.shape).contiguous()
        made[f"{name}_scale"] = scale
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP}
    scheme = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": [],
    }
    return made, {**config, "quantization_config": scheme}


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write an object; the file is whole or as it was."""
    unfinished = path.with_name("unfinished")
    unfinished.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def _eagle_config(drafter: Drafter, spec: ModelSpec, draft_vocab: int) -> dict[str, Any]:
    assert isinstance(drafter, EagleDrafter)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": draft_vocab,
        "hidden_size": spec.hidden_size,
        "intermediate_size": drafter.midlayer.mlp["gate_proj"].out_features,
        "num_hidden_layers": 1,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_position,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {"use_aux_hidden_state": False},
    }


def _medusa_config(drafter: Drafter, draft_vocab: int) -> dict[str, Any]:
    return {
        "model_type": "medusa",
        "medusa_num_heads": drafter.num_steps,
        "medusa_num_layers": 1,
        "draft_vocab_size": draft_vocab,
    }
