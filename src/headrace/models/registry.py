"""Families of models by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.layers.weights import WeightSource
from headrace.models import gemma, llama, moe, olmo2, qwen2, qwen3
from headrace.models.blocks import CausalLM, DecoderLayer, Parts
from headrace.models.spec import ModelSpec
from headrace.quant.base import QuantScheme
from headrace.quant.unquantized import Unquantized


@dataclass(frozen=True)
class Family:
    """How a family is built, which models belong to it, and from which kinds of file it is read."""

    build: Callable[[Parts], CausalLM]
    examples: tuple[str, ...]
    formats: tuple[str, ...] = ("HF", "GGUF")


FAMILIES: dict[str, Family] = {
    "llama": Family(llama.build, ("Llama 2", "Llama 3.x", "SmolLM2", "TinyLlama")),
    "mistral": Family(llama.build, ("Mistral 7B", "Mistral Small 24B")),
    "phi3": Family(llama.build, ("Phi-3 mini", "Phi-3.5 mini", "Phi-4", "Phi-4 mini")),
    "qwen2": Family(qwen2.build, ("Qwen2", "Qwen2.5", "Qwen2.5-Coder")),
    "qwen3": Family(qwen3.build, ("Qwen3 0.6B to 32B",)),
    "olmo2": Family(olmo2.build, ("OLMo 2 1B to 32B",)),
    "gemma2": Family(gemma.build2, ("Gemma 2 2B", "Gemma 2 9B", "Gemma 2 27B")),
    "gemma3": Family(gemma.build3, ("Gemma 3 270M", "Gemma 3 1B", "Gemma 3 4B to 27B (text)")),
    "mixtral": Family(moe.build, ("Mixtral 8x7B", "Mixtral 8x22B")),
    "qwen3_moe": Family(moe.build, ("Qwen3-30B-A3B", "Qwen3-235B-A22B", "Qwen3-Coder-30B-A3B")),
    "olmoe": Family(moe.build, ("OLMoE 1B-7B",)),
    "gpt_oss": Family(moe.build, ("gpt-oss-20b (bf16)", "gpt-oss-120b (bf16)")),
}


def supported() -> dict[str, Family]:
    """Families that `build_model` knows, by name."""
    return dict(sorted(FAMILIES.items()))


# families whose layers can be used by themselves, as those of multi-token prediction are
LAYERS: dict[str, Callable[[Parts, int], DecoderLayer]] = {
    **dict.fromkeys(("llama", "mistral", "phi3", "qwen2", "qwen3"), llama.layer),
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmoe"), moe.layer),
}


def build_model(spec: ModelSpec, source: WeightSource, scheme: QuantScheme | None = None) -> CausalLM:
    """The model of `spec` with the weights of `source`, float32 unless `scheme` says otherwise.

    Raises ValueError for an unknown family and for a spec that the family contradicts, WeightsError if the checkpoint
    has too few, too many or misshapen tensors.
    """
    if spec.family not in FAMILIES:
        raise ValueError(f"unknown model family {spec.family!r}; there are: {', '.join(supported())}")
    model = FAMILIES[spec.family].build(Parts(spec, source, scheme or Unquantized()))
    source.finish()
    return model
