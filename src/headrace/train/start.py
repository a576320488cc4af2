"""Heads that training begins with instead of random numbers: those of a folder, trained before on other texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from headrace.config import ConfigError
from headrace.loading.compressed import CompressedWeights
from headrace.loading.errors import CheckpointError
from headrace.loading.safetensors_file import SafetensorsFolder
from headrace.train.drafters import EagleDrafter

_OUTPUT = "lm_head.weight"


def start_from(drafter: EagleDrafter, folder: Path, draft_ids: np.ndarray) -> int:
    """Give the drafter the weights of an EAGLE head that was written by training (train/export.py). Of its output, the
    rows of tokens that both can draft; others stay the model's. Returns how many rows were taken."""
    try:
        files = SafetensorsFolder(folder)
        rounded = CompressedWeights(files)
        known = drafter.state_dict()
        found = {
            name: torch.from_numpy(np.array((rounded if name in rounded.matrices else files).read(name), np.float32))
            for name in known
        }
        old_ids = np.arange(len(found[_OUTPUT]))
        if "d2t" in files.names():
            old_ids += files.read("d2t").astype(np.int64)
    except (OSError, ValueError, KeyError, CheckpointError) as error:
        raise ConfigError(f"{folder} holds no EAGLE head to start from ({error})") from None
    for name, tensor in found.items():
        if name != _OUTPUT and tensor.shape != known[name].shape:
            raise ConfigError(
                f"{folder}: {name} has the shape {list(tensor.shape)}, not {list(known[name].shape)}; "
                "give the --inner-size of that head, or leave out --start-from"
            )
    _, new, old = np.intersect1d(draft_ids, old_ids, return_indices=True)
    rows = known[_OUTPUT].clone()
    rows[torch.from_numpy(new).to(rows.device)] = found[_OUTPUT][torch.from_numpy(old)].to(rows.device)
    drafter.load_state_dict({**found, _OUTPUT: rows})
    return len(new)
