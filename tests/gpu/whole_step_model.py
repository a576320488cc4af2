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
    """Spans with random contexts: a cache full of noise, blocks in any order."""

    def __init__(self, spec, ends, page=16, seed=0, room=3, counts=None):
        """`ends`: the context of each span's last token, itself included; `counts`: tokens of each span, 1 if None."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        self.spec, self.page = spec, page
        self.counts = [1] * len(ends) if counts is None else counts
        tokens = [(span, end - left) for span, end in enumerate(ends) for left in reversed(range(self.counts[span]))]
        self.span_of = [span for span, _ in tokens]
        self.lengths = [length for _, length in tokens]  # of each token's context
        most = max([-(-end // page) for end in ends], default=1) + 1
        table_rows = len(ends) + room
        blocks = table_rows * most + 5
        shape = (blocks, spec.num_kv_heads, page, spec.head_dim)
        self.pages = [
            tuple(torch.randn(shape, generator=generator, device=DEVICE).bfloat16() for _ in range(2))
            for _ in range(spec.num_layers)
        ]
        order = torch.randperm(blocks, generator=generator, device=DEVICE)[: table_rows * most]
        self.block_table = order.view(table_rows, most).int()
        self.rows = torch.randperm(table_rows, generator=generator, device=DEVICE)[: len(ends)].int()
        self.tokens = torch.randint(0, spec.vocab_size, (len(tokens),), generator=generator, device=DEVICE).int()

    def step(self, capacity):
        """What a step padded to `capacity` tokens is called with: spans, block table, number of tokens, their spans."""

        def padded(values, size, fill=0):
            out = torch.full((size,), fill, dtype=torch.int32, device=DEVICE)
            out[: len(values)] = torch.as_tensor(values, dtype=torch.int32, device=DEVICE)
            return out

        positions = padded([length - 1 for length in self.lengths], capacity)
        starts = [sum(self.counts[:span]) for span in range(len(self.counts) + 1)]
        spans = StepSpans(
            rows=padded(self.rows, capacity), query_start=padded(starts, capacity + 1, capacity),
            num_rows=padded([len(self.counts)], 1), token_ids=padded(self.tokens, capacity), positions=positions,
            seq_lens=positions, slots=positions[None],
        )  # fmt: skip
        span_of = None if max(self.counts, default=1) == 1 else padded(self.span_of, capacity)
        return spans, self.block_table, padded([len(self.lengths)], 1), span_of

    def place(self, token, position):
        block = int(self.block_table[int(self.rows[self.span_of[token]]), position // self.page])
        return block, position % self.page

    def context(self, layer, token):
        """Keys and values [N, kv heads, D] that the cache held of a token's context, float32."""
        spec, length = self.spec, self.lengths[self.span_of.index(self.span_of[token])] - 1
        blocks = self.block_table[int(self.rows[self.span_of[token]]), : -(-length // self.page)].long()
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
    """(logits float32 [T, V], new keys and values of each layer [T, kv heads, D])."""
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
        for token, span in enumerate(inputs.span_of):
            old_keys, old_values = inputs.context(index, token)
            new = slice(inputs.span_of.index(span), token + 1)
            keys, values = torch.cat([old_keys, k[new]]), torch.cat([old_values, v[new]])
            shared = spec.num_heads // spec.num_kv_heads
            scores = torch.einsum("kgd,nkd->kgn", q[token].view(-1, shared, spec.head_dim), keys)
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
