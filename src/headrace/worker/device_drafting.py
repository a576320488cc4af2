"""The proposers that the configuration names, for a GPU: look-ups run on the host, networks on the GPU."""

from __future__ import annotations

import torch

from headrace.config import EngineConfig
from headrace.models.blocks import CausalLM
from headrace.quant.base import QuantScheme
from headrace.spec.base import Proposer
from headrace.spec.combined import CombinedProposer
from headrace.worker.drafting import DraftSource, combine


def make_device_proposer(
    config: EngineConfig,
    target: CausalLM,
    scheme: QuantScheme,
    draft: DraftSource | None,
    device: torch.device,
) -> CombinedProposer:
    """All of config.proposers, in that order, for the model that verifies."""

    def make_network() -> Proposer:
        raise ValueError("no network drafts on a GPU yet")

    return combine(config, make_network)
