"""The proposers that the configuration names, for a GPU: look-ups run on the host, networks on the GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from headrace.attention.select import select_backend
from headrace.attention.triton import TritonAttention
from headrace.config import EngineConfig
from headrace.layers.weights import WeightSource
from headrace.models.blocks import CausalLM, Parts
from headrace.models.registry import build_model
from headrace.ops.xp import Array
from headrace.quant.base import QuantScheme
from headrace.sampling.grammar import GrammarCompiler
from headrace.spec.base import Proposer
from headrace.spec.combined import CombinedProposer
from headrace.spec.draft_model import DraftModelProposer
from headrace.spec.draft_runner import NEAR
from headrace.worker.device_eagle import DeviceHeadRunner, HeadModel
from headrace.worker.device_heads import DeviceStateRunner
from headrace.worker.device_networks import (
    CATCH_UP,
    CutModel,
    DeviceDraftProposer,
    DeviceDraftRunner,
    DeviceParallelRunner,
    Passes,
)
from headrace.worker.drafting import DraftSource, build_head, combine, plain_sampler, state_heads
from headrace.worker.step_kernel import StepKernelChoice


def make_device_proposer(
    config: EngineConfig,
    target: CausalLM,
    scheme: QuantScheme,
    draft: DraftSource | None,
    dtype: torch.dtype,
    device: torch.device,
    place: Callable[[np.ndarray], Array],
    grammars: GrammarCompiler | None = None,
) -> CombinedProposer:
    """All of config.proposers, in that order, for the model that verifies; `place` brings an array to `device`."""

    def make_network() -> Proposer:
        if draft is None:
            raise ValueError("the configuration has a draft model, but none was opened")
        layout, source = draft.layout, WeightSource(draft.checkpoint, place)
        most, max_len = config.max_draft_tokens, config.max_model_len
        if draft.states is not None:
            heads = state_heads(source, scheme, target, draft.states)
            source.finish()
            sampler, residual = plain_sampler(grammars), config.verify == "residual"
            return DraftModelProposer(
                DeviceStateRunner(heads, device), sampler, most, target.spec.vocab_size, residual
            )
        max_tokens = max(CATCH_UP, config.max_num_seqs * (max(NEAR, most) + 1))
        model: CutModel | HeadModel
        step_kernel: StepKernelChoice | None = None
        if draft.head is None:
            if draft.mask_token is None:
                step_kernel = StepKernelChoice(draft.spec, config, layout, device)  # compiled while weights are read
            network = build_model(draft.spec, source, scheme)
            network.prepare(max_len, place)
            model = CutModel(network, target.spec.vocab_size)
        else:
            head = build_head(Parts(draft.spec, source, scheme), target, draft.head)
            head.rotary.prepare(max_len, place)
            target.taps = head.taps
            model = HeadModel(head, max_tokens, device)
        backend, _ = select_backend("cuda", config.dtype, model.attention_layers, layout.block_size)
        assert isinstance(backend, TritonAttention)
        passes = Passes(
            model, layout, backend, config, dtype, device, max_tokens, draft.mask_token is not None, step_kernel
        )
        runner: DeviceDraftRunner | DeviceHeadRunner
        if isinstance(model, HeadModel):
            runner = DeviceHeadRunner(model, passes, layout, max_len)
        elif draft.mask_token is None:
            runner = DeviceDraftRunner(model, passes, layout, max_len)
        else:
            runner = DeviceParallelRunner(model, passes, layout, max_len, draft.mask_token)
        return DeviceDraftProposer(runner, most, target.spec.vocab_size)

    return combine(config, make_network)
