"""Matrices of heads in int8: read back, they are what they were to half a step of their group's scale."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.config import ConfigError
from headrace.loading.compressed import CompressedWeights, check_scheme
from headrace.loading.safetensors_file import SafetensorsFolder
from headrace.train.export import rounded
from headrace.train.settings import TrainArgs


def test_rounded_to_half_a_step(tmp_path):
    torch.manual_seed(0)
    matrix = torch.randn(6, 128) * torch.logspace(-1, 1, 6)[:, None]
    matrix[0, :64] = 0.0
    odd, norm = torch.randn(4, 40), torch.randn(128)
    made, config = rounded({"fc.weight": matrix, "odd.weight": odd, "norm.weight": norm}, {"hidden_size": 128})
    assert config["hidden_size"] == 128
    check_scheme(config["quantization_config"], tmp_path)
    assert made["odd.weight"] is odd and made["norm.weight"] is norm  # no groups of 64; no matrix
    assert made["fc.weight"].dtype == torch.int8 and made["fc.weight_scale"].shape == (6, 2)
    save_file(made, tmp_path / "model.safetensors")
    read = CompressedWeights(SafetensorsFolder(tmp_path)).read("fc.weight").reshape(6, 2, 64)
    step = made["fc.weight_scale"].float().numpy()[..., None]
    off_by = np.abs(read - matrix.numpy().reshape(6, 2, 64)) / step
    assert off_by.max() < 0.57  # half a step, and what rounding of the scale adds to the largest
    assert not read[0, 0].any()


def test_medusa_heads_stay_floats():
    with pytest.raises(ConfigError, match="weights int8 is for EAGLE heads"):
        TrainArgs(kind="medusa", weights="int8")
