"""Models with random weights on a GPU, and what a decode step of one must give, computed in float32."""

from __future__ import annotations

import zlib

import torch

from headrace.layers.weights import WeightSource
from headrace.loading.dummy import tensor_shapes
from headrace.models.registry import build_model
from headrace.models.spec import ModelSpec
from headrace.ops.triton.step import StepSpans
from headrace.quant.cuda import bind_cuda

DEVICE = torch.device("cuda")


def spec_of(hidden, inner, heads, kv_heads, dim, *, layers=2, vocab=1000, bias=False, qk_norm=False, **more):
    family = "qwen3" if qk_norm else "qwen2" if bias else "llama"
    return ModelSpec(
        family=family, vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, norm_eps=1e-5, max_position=8192, qkv_bias=bias,
        qk_norm=qk_norm, **more,
    )  # fmt: skip


class RandomCheckpoint:
    """Weights whose products neither grow nor shrink; norms around 1."""

    def __init__(self, spec):
        self._shapes = tensor_shapes(spec)

    def names(self):
        return self._shapes

    def shape(self, name):
        return self._shapes[name]

    def _draw(self, name, target):
        generator = torch.Generator(DEVICE).manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(target.shape, generator=generator, device=DEVICE, dtype=torch.float32)
        if len(target.shape) == 2:
            return noise.mul_(1.0 if "embed" in name else target.shape[1] ** -0.5)
        return noise.mul_(0.2).add_(0.0 if name.endswith("bias") else 1.0)

    def fill(self, name, target):
        target.copy_(self._draw(name, target))

    def read(self, name):
        return self._draw(name, torch.empty(self._shapes[name], device="meta")).cpu().numpy()


def make_model(spec, positions=4096):
    scheme = bind_cuda(DEVICE, torch.bfloat16)

    def place(array):
        return torch.tensor(array, device=DEVICE)

    model = build_model(spec, WeightSource(RandomCheckpoint(spec), place), scheme)
    model.prepare(positions, place)
    return model


class StepInputs:
    """Rows with random contexts: a cache full of noise, blocks in any order."""

    def __init__(self, spec, lengths, page=16, seed=0, room=3):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        self.spec, self.lengths, self.page = spec, lengths, page
        most = max([-(-length // page) for length in lengths], default=1) + 1
        table_rows = len(lengths) + room
        blocks = table_rows * most + 5
        shape = (blocks, spec.num_kv_heads, page, spec.head_dim)
        self.pages = [
            tuple(torch.randn(shape, generator=generator, device=DEVICE).bfloat16() for _ in range(2))
            for _ in range(spec.num_layers)
        ]
        order = torch.randperm(blocks, generator=generator, device=DEVICE)[: table_rows * most]
        self.block_table = order.view(table_rows, most).int()
        self.rows = torch.randperm(table_rows, generator=generator, device=DEVICE)[: len(lengths)].int()
        self.tokens = torch.randint(0, spec.vocab_size, (len(lengths),), generator=generator, device=DEVICE).int()

    def spans(self, capacity):
        """(spans, number of real rows) of a step that is padded to `capacity` rows."""
        count = len(self.lengths)

        def padded(values, fill):
            out = torch.full((capacity,), fill, dtype=torch.int32, device=DEVICE)
            out[:count] = torch.as_tensor(values, dtype=torch.int32, device=DEVICE)
            return out

        lengths = padded(self.lengths, 0)
        spans = StepSpans(
            rows=padded(self.rows, 0), query_start=torch.arange(capacity + 1, dtype=torch.int32, device=DEVICE),
            num_rows=torch.tensor([count], dtype=torch.int32, device=DEVICE), token_ids=padded(self.tokens, 0),
            positions=(lengths - 1).clamp(min=0), seq_lens=lengths, slots=lengths[None],
        )  # fmt: skip
        return spans, spans.num_rows

    def place(self, row, position):
        block = int(self.block_table[int(self.rows[row]), position // self.page])
        return block, position % self.page

    def context(self, layer, row):
        """Keys and values [length - 1, kv heads, D] in the cache, float32."""
        spec, length = self.spec, self.lengths[row] - 1
        blocks = self.block_table[int(self.rows[row]), : -(-length // self.page)].long()
        return [
            pages[blocks].transpose(1, 2).reshape(-1, spec.num_kv_heads, spec.head_dim)[:length].float()
            for pages in self.pages[layer]
        ]


def _normed(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _turned(x, cos, sin):
    """x [R, heads, D]; cos and sin [R, half]."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    return torch.cat([first * c - second * s, second * c + first * s, rest], -1)


def reference_step(model, inputs):
    """(logits float32 [R, V], new keys and values of each layer [R, kv heads, D])."""
    spec = model.spec
    cos, sin = (table[torch.tensor(inputs.lengths, device=DEVICE) - 1] for table in model.rotaries[spec.rope].tables)
    residual = model.embedding.weight.weight[inputs.tokens.long()].float()
    written = []
    for index, layer in enumerate(model.layers):
        x = _normed(residual, layer.before_attention.weight, spec.norm_eps)
        qkv = x @ layer.attention.qkv.weights.weight.float().T
        if layer.attention.qkv.bias is not None:
            qkv = qkv + layer.attention.qkv.bias
        heads = qkv.view(len(inputs.lengths), -1, spec.head_dim)
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
        if layer.attention.norms:
            q, k = (
                _normed(each, norm.weight, norm.eps) for each, norm in zip((q, k), layer.attention.norms, strict=True)
            )
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        written.append((k, v))
        mixed = []
        for row in range(len(inputs.lengths)):
            old_keys, old_values = inputs.context(index, row)
            keys, values = torch.cat([old_keys, k[row : row + 1]]), torch.cat([old_values, v[row : row + 1]])
            shared = spec.num_heads // spec.num_kv_heads
            scores = torch.einsum("kgd,nkd->kgn", q[row].view(-1, shared, spec.head_dim), keys)
            weights = torch.softmax(scores * layer.attention.settings.scale, -1)
            mixed.append(torch.einsum("kgn,nkd->kgd", weights, values).reshape(-1))
        residual = residual + torch.stack(mixed) @ layer.attention.out.weights.weight.float().T
        x = _normed(residual, layer.before_mlp.weight, spec.norm_eps)
        gate, up = (x @ layer.mlp.gate_up.weights.weight.float().T).chunk(2, -1)
        if spec.activation == "silu":
            gate = torch.nn.functional.silu(gate)
        else:
            gate = torch.nn.functional.gelu(gate, approximate="tanh")
        residual = residual + (gate * up) @ layer.mlp.down.weights.weight.float().T
    x = _normed(residual, model.norm.weight, spec.norm_eps)
    return x @ model.head.weight.weight.float().T, written
