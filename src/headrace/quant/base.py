"""How a linear layer stores its weights and multiplies with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from headrace.layers.weights import WeightSource
from headrace.ops.xp import Array


class LinearMethod(Protocol):
    """Stores one linear layer's weights and multiplies with them; layers know only this interface.

    `create` merges the tensors `names` with `shapes` [(out, in), ...], one below the other, into whatever the method
    multiplies with; `apply` gets that back as `weights`.
    """

    input_quant: str | None  # activation format that `apply` wants from the op before it; None: float32

    def create(self, source: WeightSource, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> Any:
        """The layer's stored weights. Missing or misshapen tensors are noted in `source`."""
        ...

    def apply(self, weights: Any, x: Array, bias: Array | None, out: Array | None = None) -> Array:
        """x [T, in] through the layer: float32 [T, sum of out]."""
        ...

    def rows(self, weights: Any, ids: Array) -> Array:
        """Rows `ids` [T] of the stored matrix as float32 [T, in], fresh memory: the layer as an embedding."""
        ...

    def num_bytes(self, weights: Any) -> int:
        """Bytes that `apply` reads of `weights`."""
        ...


class QuantScheme(Protocol):
    """Which method each layer of a model uses."""

    name: str

    def linear(self, name: str) -> LinearMethod:
        """The method of the linear layer whose first module is called `name` (model.layers.0.mlp.down_proj)."""
        ...
