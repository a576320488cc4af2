"""Heads that begin at the model's last hidden state, on a GPU: they compute there, and what they score is drawn from on
the host, by the CPU engine's proposer (spec/draft_model.py), which knows all options of requests and makes their trees.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headrace.ops.xp import Array
from headrace.spec.state_heads import StateHeads, StateRunner


class DeviceStateRunner(StateRunner):
    """See StateRunner."""

    def __init__(self, heads: StateHeads, device: torch.device):
        super().__init__(heads)
        self._device = device

    @torch.inference_mode()
    def _run(self, head: int, states: Sequence[Array], token_ids: np.ndarray) -> tuple[np.ndarray, Array]:
        tokens = torch.from_numpy(np.ascontiguousarray(token_ids)).to(self._device)
        logits, made = self.model.draft(head, torch.stack(list(states)), tokens)
        return logits.float().cpu().numpy(), made

    @torch.inference_mode()
    def _taken(self, values: Array, index: np.ndarray) -> Array:
        return values[torch.from_numpy(index).to(self._device, non_blocking=True)].float()
