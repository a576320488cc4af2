"""The gated feed-forward block."""

from __future__ import annotations

from collections.abc import Callable

from headrace import ops
from headrace.layers.linear import Linear, MergedLinear, Shard, Split
from headrace.layers.weights import WeightSource
from headrace.models.spec import ModelSpec
from headrace.ops.xp import Array
from headrace.quant.base import QuantScheme

ACTIVATIONS: dict[str, Callable[..., Array]] = {
    "silu": ops.silu_mul,
    "gelu": ops.gelu_mul,
    "gelu_tanh": ops.gelu_tanh_mul,
}


class GatedMLP:
    """down(activation(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, spec: ModelSpec, source: WeightSource, prefix: str, scheme: QuantScheme):
        if spec.activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {spec.activation!r}; there are: {', '.join(ACTIVATIONS)}")
        self.activation = ACTIVATIONS[spec.activation]
        inner, bias = spec.intermediate_size, spec.mlp_bias
        self.gate_up = MergedLinear(
            source,
            [Shard(f"{prefix}.gate_proj", inner, bias), Shard(f"{prefix}.up_proj", inner, bias)],
            spec.hidden_size,
            scheme,
        )
        self.down = Linear(source, Shard(f"{prefix}.down_proj", spec.hidden_size, bias), inner, scheme, Split.ROW)

    def __call__(self, x: Array) -> Array:
        """x [T, H] -> [T, H]."""
        return self.down(self.activation(self.gate_up(x)))

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return (self.gate_up, self.down)
