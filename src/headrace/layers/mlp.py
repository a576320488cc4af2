"""The gated feed-forward block."""

from __future__ import annotations

from headrace import ops
from headrace.layers.linear import Linear, MergedLinear, Shard, Split
from headrace.layers.weights import WeightSource
from headrace.models.spec import ModelSpec
from headrace.ops.registry import Op
from headrace.ops.xp import Array
from headrace.quant.base import QuantScheme


def activation(name: str) -> Op:
    """The gated activation called `name`; ValueError lists those there are."""
    if name not in ops.ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; there are: {', '.join(ops.ACTIVATIONS)}")
    return ops.ACTIVATIONS[name]


class GatedMLP:
    """down(activation(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, spec: ModelSpec, source: WeightSource, prefix: str, scheme: QuantScheme):
        self.activation = activation(spec.activation)
        inner, bias = spec.intermediate_size, spec.mlp_bias
        sizes = {"gate_up_proj": 2 * inner} if spec.fused_projections else {"gate_proj": inner, "up_proj": inner}
        shards = [Shard(f"{prefix}.{name}", size, bias) for name, size in sizes.items()]
        self.gate_up = MergedLinear(source, shards, spec.hidden_size, scheme)
        self.down = Linear(source, Shard(f"{prefix}.down_proj", spec.hidden_size, bias), inner, scheme, Split.ROW)

    def __call__(self, x: Array) -> Array:
        """x [T, H] -> [T, H]."""
        return self.down.partial(self.gate_up.gated(x, self.activation))

    @property
    def num_parameters(self) -> int:
        return self.gate_up.num_parameters + self.down.num_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes that one call reads of weights and biases."""
        return self.gate_up.weight_bytes + self.down.weight_bytes
