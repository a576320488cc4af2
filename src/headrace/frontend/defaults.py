"""Sampling where the user says nothing."""

from __future__ import annotations

from headrace.core.request import RequestError
from headrace.loading.checkpoint import LoadedCheckpoint
from headrace.sampling.params import SamplingParams

_GENERATION = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def recommended_params(checkpoint: LoadedCheckpoint) -> SamplingParams:
    """What the model's generation_config recommends, over plain sampling; RequestError if it is not usable."""
    known = {name: checkpoint.generation[name] for name in _GENERATION if name in checkpoint.generation}
    if checkpoint.generation.get("do_sample") is False:
        known["temperature"] = 0.0
    try:
        return SamplingParams(**known)
    except ValueError as error:
        raise RequestError(f"{checkpoint.path}: generation_config is not usable: {error}") from None
