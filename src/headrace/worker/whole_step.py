"""WholeStep: a step of up to eight tokens, from token ids to logits, in one kernel that runs on all processors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.models.blocks import CausalLM
from headrace.ops.cuda.library import StepLibrary, StepParams
from headrace.ops.cuda.shape import LEAST_KEYS, MOST_ROWS, SHARED, ProductCut, StepShape, cut_step
from headrace.ops.triton.runtime import num_processors
from headrace.ops.triton.step import StepSpans

_COUNTER = 32  # words: a cache line each
CAPACITIES = (1, 2, 4, 8)


class WholeStep:
    """The kernel with the weights, the cache and the memory that it works on. Steps must not overlap."""

    def __init__(
        self,
        library: StepLibrary,
        shape: StepShape,
        model: CausalLM,
        pages: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
        least_keys: int = LEAST_KEYS,
        vocab_size: int | None = None,
    ):
        """`pages(layer)`: key and value pages [blocks, kv heads, block size, head dim]. Raises ValueError where shared
        memory is too small for a single row. `least_keys`: of a part of a context. `vocab_size`: of the tokens that
        logits are wanted of, the first ones; None: all."""
        self._library, self._shape, self._model = library, shape, model
        self._vocab_size = model.spec.vocab_size if vocab_size is None else vocab_size
        self._grid, self._least_keys = num_processors(), least_keys
        self._cuts = self._fitting_cuts(self._vocab_size)
        if not self._cuts:
            raise ValueError(f"a row of {shape.hidden} numbers does not fit in shared memory beside the weights")
        self.most_rows = max(self._cuts)  # of a step
        self._shared_bytes = {
            capacity: library.source_at + max(library.attention_bytes, *(cut.source_bytes(capacity) for cut in cuts))
            for capacity, cuts in self._cuts.items()
        }
        library.prepare(max(self._shared_bytes.values()))
        device = self._device = model.embedding.weight.weight.device
        rotary = next(iter(model.rotaries.values()))
        self._cosines, self._sines = rotary.tables
        self._layers = torch.tensor(
            [self._pointers(index, *pages(index)) for index in range(len(model.layers))],
            dtype=torch.int64, device=device,
        )  # fmt: skip
        self._maps = {capacity: self._encode(cuts) for capacity, cuts in self._cuts.items()}
        self._take_memory()

    def _fitting_cuts(self, vocab: int) -> dict[int, list[ProductCut]]:
        room = SHARED - self._library.source_at
        found = {
            capacity: cut_step(self._shape, vocab, capacity, room, self._grid)
            for capacity in CAPACITIES
            if self._library.attention_bytes <= room
        }
        return {capacity: cuts for capacity, cuts in found.items() if cuts is not None}

    def _take_memory(self) -> None:
        shape, device = self._shape, self._device

        def floats(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.float32, device=device)

        def halves(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.bfloat16, device=device)

        def words(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        split = [cut for cuts in self._cuts.values() for cut in cuts if cut.splits > 1]
        # Cut in csrc/attention.cuh makes no more parts than this
        units = shape.kv_heads * (max(self._grid // shape.kv_heads, MOST_ROWS) + MOST_ROWS)
        self._memory = {
            "residual": floats(MOST_ROWS, shape.hidden),
            "normed": halves(MOST_ROWS, shape.hidden),
            "squares": floats(MOST_ROWS, shape.hidden // 16),
            "qkv": floats(MOST_ROWS, shape.qkv_size),
            "mixed": halves(MOST_ROWS, shape.q_size),
            "activated": halves(MOST_ROWS, shape.inner),
            "partial": floats(max((cut.tiles * cut.splits for cut in split), default=1), MOST_ROWS * 16),
            "part_out": floats(units, shape.heads // shape.kv_heads * shape.head_dim),
            "part_norm": floats(units, shape.heads // shape.kv_heads * 2),
            "epoch": words(_COUNTER),
            "counters": words((1 + 5 * len(self._model.layers)) * _COUNTER),
            "product_tickets": words(-(-shape.hidden // 16)),
            "unit_tickets": words(MOST_ROWS * shape.kv_heads),
        }

    def _pointers(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> list[int]:
        """`Layer` of csrc/params.cuh."""
        layers = self._model.layers
        layer = layers[index]
        first, second = layer.before_attention, layer.before_mlp
        behind = layers[index + 1].before_attention if index + 1 < len(layers) else self._model.norm
        assert isinstance(first, RMSNorm) and isinstance(second, RMSNorm) and isinstance(behind, RMSNorm)
        bias = layer.attention.qkv.bias
        gains = [norm.weight for norm in layer.attention.norms] or [None, None]
        tensors = [first.weight, second.weight, behind.weight, bias, *gains, keys, values]
        return [0 if each is None else each.data_ptr() for each in tensors]

    def _encode(self, cuts: list[ProductCut]) -> torch.Tensor:
        """Tensor maps of all weights, uint8, as `Params.maps` has them."""
        maps = b""
        for layer in self._model.layers:
            assert isinstance(layer.mlp, GatedMLP)
            products = (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
            for index, (product, cut) in enumerate(zip(products, cuts, strict=False)):
                maps += self._map(product.weights.weight, cut, gated=index == 2)
        maps += self._map(self._model.head.weight.weight, cuts[-1], gated=False)
        return torch.frombuffer(bytearray(maps), dtype=torch.uint8).to(self._device)

    def _map(self, weight: torch.Tensor, cut: ProductCut, gated: bool) -> bytes:
        assert weight.dtype == torch.bfloat16 and weight.is_contiguous()
        return self._library.encode(weight.data_ptr(), cut.rows, weight.shape[1], cut, gated)

    def try_launch(self) -> None:
        """A step of padding only. Raises RuntimeError where the kernel cannot run, before a graph is made of it."""
        zeros = torch.zeros(2, dtype=torch.int32, device=self._device)
        one = zeros[:1]
        self.logits(StepSpans(one, zeros, one, one, one, one, one[None]), one[None], one, None)
        torch.cuda.synchronize(self._device)

    def logits(
        self, spans: StepSpans, block_table: torch.Tensor, num_tokens: torch.Tensor, span_of: torch.Tensor | None
    ) -> torch.Tensor:
        """float32 [T, V] of the T tokens of a step, T up to `most_rows`; keys and values are written.

        Read on the GPU: token_ids and positions [T], rows and query_start of `spans`; `span_of` int32 [T], which span
        each token is of (None: each has one token); `num_tokens` int32 [1], how many are real: the others' logits are
        undefined. `block_table` int32 [max rows, blocks]. Raises RuntimeError where the kernel does not start.
        """
        tokens = spans.token_ids.shape[0]
        capacity = next(size for size in self._cuts if size >= tokens)
        model, spec = self._model, self._model.spec
        logits = torch.empty((tokens, self._vocab_size), dtype=torch.float32, device=self._device)
        tensors = {
            **self._memory,
            "maps": self._maps[capacity],
            "layers": self._layers,
            "embedding": model.embedding.weight.weight,
            "cosines": self._cosines,
            "sines": self._sines,
            "num_tokens": num_tokens,
            "token_ids": spans.token_ids,
            "positions": spans.positions,
            "query_start": spans.query_start,
            "rows": spans.rows,
            "block_table": block_table,
            "logits": logits,
        }
        first = model.layers[0].attention
        params = StepParams(
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            span_of=0 if span_of is None else span_of.data_ptr(),
            num_layers=len(model.layers),
            capacity=tokens,
            table_stride=block_table.stride(0),
            least_keys=self._least_keys,
            eps=spec.norm_eps,
            head_eps=spec.norm_eps,
            scale=first.settings.scale,
            embedding_scale=model.embedding.scale,
        )
        params.cut(self._cuts[capacity])
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._library.launch(params, self._grid, self._shared_bytes[capacity], stream)
        return logits

    def hidden(self, num_tokens: int) -> torch.Tensor:
        """Hidden states [T, H] after the final norm, of the first tokens of the step that ran last."""
        normed: torch.Tensor = self._model.norm(self._memory["residual"][:num_tokens])
        return normed
