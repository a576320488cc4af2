"""Families of models by name."""

from __future__ import annotations

from collections.abc import Callable

from headrace.layers.weights import WeightSource
from headrace.models import llama, qwen2, qwen3
from headrace.models.blocks import CausalLM, Parts
from headrace.models.spec import ModelSpec
from headrace.quant.base import QuantScheme
from headrace.quant.unquantized import Unquantized

FAMILIES: dict[str, Callable[[Parts], CausalLM]] = {
    "llama": llama.build,
    "mistral": llama.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
}


def supported() -> list[str]:
    """Families that `build_model` knows."""
    return sorted(FAMILIES)


def build_model(spec: ModelSpec, source: WeightSource, scheme: QuantScheme | None = None) -> CausalLM:
    """The model of `spec` with the weights of `source`, float32 unless `scheme` says otherwise.

    Raises ValueError for an unknown family and for a spec that the family contradicts, WeightsError if the checkpoint
    has too few, too many or misshapen tensors.
    """
    if spec.family not in FAMILIES:
        raise ValueError(f"unknown model family {spec.family!r}; there are: {', '.join(supported())}")
    model = FAMILIES[spec.family](Parts(spec, source, scheme or Unquantized()))
    source.finish()
    return model
