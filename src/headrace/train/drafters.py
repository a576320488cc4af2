"""What is trained: draft heads as torch modules, whose tensors have the names of the published files.

Both kinds are trained by the same steps. Of a text's positions i with features f and tokens t, every position p begins
a chain: its step s guesses the token that follows position p + 1 + s, whose distribution is the model's own there.

    Medusa   step s is head s of f[p]
    EAGLE    step 0 is the head over the entries (f[0], t[1]) ... (f[p], t[p + 1]); step s adds the entry of the token
             t[p + 1 + s] and the feature that step s - 1 made, as drafting will ("training-time test" of EAGLE-3: Li
             et al. 2025, section 3.2)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.models.spec import ModelSpec


class Drafter(nn.Module):
    """What the training loop knows of heads."""

    num_steps: int

    @abstractmethod
    def steps(self, embedded: Tensor, features: Tensor) -> Iterator[Tensor]:
        """Hidden states [B, L - 1, H] of each step for chains from positions 0 to L - 2, of texts' embedded tokens
        [B, L, H] and features [B, L, H]."""

    @abstractmethod
    def score(self, step: int, hidden: Tensor) -> Tensor:
        """Logits [N, D] of the tokens that can be drafted, of hidden states [N, H] of a step."""


class MedusaDrafter(Drafter):
    """Medusa heads with one residual block each (Cai et al. 2024)."""

    def __init__(self, spec: ModelSpec, num_heads: int, output: Tensor):
        """`output` [D, H]: the model's output rows of the tokens that can be drafted, where heads begin."""
        super().__init__()
        self.num_steps = num_heads
        size = spec.hidden_size
        for head in range(num_heads):
            block = nn.ModuleDict({"linear": nn.Linear(size, size)})
            nn.init.zeros_(block["linear"].weight)  # type: ignore[arg-type]
            nn.init.zeros_(block["linear"].bias)  # type: ignore[arg-type]
            scores = nn.Linear(size, len(output), bias=False)
            scores.weight.data.copy_(output)
            self.add_module(str(head), nn.ModuleList([block, scores]))

    def steps(self, embedded: Tensor, features: Tensor) -> Iterator[Tensor]:
        here = features[:, :-1]
        for head in range(self.num_steps):
            linear = self.get_submodule(f"{head}.0.linear")
            yield here + F.silu(linear(here))

    def score(self, step: int, hidden: Tensor) -> Tensor:
        scores: Tensor = self.get_submodule(f"{step}.1")(hidden)
        return scores


class EagleDrafter(Drafter):
    """An EAGLE-3 head whose feature is the last hidden state (models/draft_heads.py, Eagle3Head)."""

    def __init__(self, spec: ModelSpec, num_steps: int, output: Tensor, inner_size: int):
        """`output` as for MedusaDrafter; `inner_size`: of the feed-forward block."""
        super().__init__()
        self.num_steps = num_steps
        self.midlayer = _Layer(spec, inner_size)
        self.norm = nn.RMSNorm(spec.hidden_size, spec.norm_eps)
        self.lm_head = nn.Linear(spec.hidden_size, len(output), bias=False)
        self.lm_head.weight.data.copy_(output)

    def steps(self, embedded: Tensor, features: Tensor) -> Iterator[Tensor]:
        chains = features.shape[1] - 1
        padded = F.pad(embedded, (0, 0, 0, self.num_steps))
        made = features[:, :chains].float()  # what is added up stays float32, as in the engine
        kept: list[tuple[Tensor, Tensor]] = []
        for step in range(self.num_steps):
            made = self.midlayer(padded[:, step + 1 : step + 1 + chains], made, step, kept)
            yield self.norm(made)

    def score(self, step: int, hidden: Tensor) -> Tensor:
        scores: Tensor = self.lm_head(hidden)
        return scores


class _Layer(nn.Module):
    """The decoder layer of an EAGLE-3 head, for all chains of a text at once."""

    def __init__(self, spec: ModelSpec, inner_size: int):
        super().__init__()
        size = spec.hidden_size
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.theta = spec.rope.theta
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * size, spec.q_size, bias=False),
                "k_proj": nn.Linear(2 * size, spec.kv_size, bias=False),
                "v_proj": nn.Linear(2 * size, spec.kv_size, bias=False),
                "o_proj": nn.Linear(spec.q_size, size, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(size, inner_size, bias=False),
                "up_proj": nn.Linear(size, inner_size, bias=False),
                "down_proj": nn.Linear(inner_size, size, bias=False),
            }
        )
        self.input_layernorm = nn.RMSNorm(size, spec.norm_eps)
        self.hidden_norm = nn.RMSNorm(size, spec.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(size, spec.norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 if "o_proj" not in name and "down_proj" not in name else 0.01)

    def forward(self, embedded: Tensor, features: Tensor, step: int, kept: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Features [B, C, H] that follow the entries (embedded, features) [B, C, H] of a step; `kept` holds keys and
        values of the steps before, [B, heads, C, dim] each, and gets this one's."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(features)], -1)
        at = torch.arange(features.shape[1], device=features.device) + step
        q = self._rotated(self._heads("q_proj", both, self.num_heads), at)
        k = self._rotated(self._heads("k_proj", both, self.num_kv_heads), at)
        v = self._heads("v_proj", both, self.num_kv_heads)
        shared = self.num_heads // self.num_kv_heads
        kept.append((k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)))
        residual = features + self.self_attn["o_proj"](_attended(q, kept))
        normed = self.post_attention_layernorm(residual)
        inner = F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        out: Tensor = residual + self.mlp["down_proj"](inner)
        return out

    def _heads(self, name: str, x: Tensor, count: int) -> Tensor:
        y: Tensor = self.self_attn[name](x)
        return y.view(*x.shape[:2], count, self.head_dim).transpose(1, 2)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary positions (Su et al. 2021), first half of a head against the second."""
        half = self.head_dim // 2
        exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
        angles = positions.float()[:, None] / self.theta**exponents
        cos, sin = angles.cos(), angles.sin()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _attended(q: Tensor, kept: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[B, C, heads * dim] of queries [B, heads, C, dim]: chain p sees the entries 0 to p of step 0, and of every later
    step its own one."""
    (keys, values), later = kept[0], kept[1:]
    if not later:
        mixed = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
    else:
        scale = q.shape[-1] ** -0.5
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ keys.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf"))
        own = [(q * k).sum(-1, keepdim=True) * scale for k, _ in later]
        weights = torch.cat([scores, *own], -1).float().softmax(-1).to(q.dtype)
        chains = q.shape[2]
        mixed = weights[..., :chains] @ values
        for index, (_, v) in enumerate(later):
            mixed = mixed + weights[..., chains + index, None] * v
    return mixed.transpose(1, 2).flatten(2)
