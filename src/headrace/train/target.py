"""The model whose drafts are trained, run over whole texts by the engine's own layers and kernels: what heads learn
from is what they will see."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headrace.config import ConfigError
from headrace.layers.weights import WeightSource
from headrace.loading.checkpoint import LoadedCheckpoint
from headrace.models.registry import build_model

_LOGIT_CHUNK = 2048  # positions whose scores of all tokens are held at once


class Target:
    """Features and token probabilities of texts; nothing in it learns."""

    def __init__(
        self,
        checkpoint: LoadedCheckpoint,
        device: torch.device,
        dtype: torch.dtype,
        max_len: int,
        num_threads: int = 1,
        mode: str = "default",
        on_gpu: bool | None = None,
    ):
        """On a GPU in `dtype`; on a CPU in one of the engine's modes. `max_len`: longest text. Binds the ops of this
        process (ops/registry.py)."""
        spec = checkpoint.spec
        if spec.attention_sinks or spec.attention_soft_cap is not None:
            raise ConfigError(f"heads of {spec.family} models cannot be trained: attention with sinks or a soft cap")
        self.spec, self.device, self.dtype = spec, device, dtype
        self._on_gpu = device.type == "cuda" if on_gpu is None else on_gpu
        if self._on_gpu:
            from headrace.quant.cuda import bind_cuda

            if spec.moe is not None:
                raise ConfigError(f"{spec.family} models have experts, which do not run on GPUs yet; use device=cpu")
            scheme = bind_cuda(device, dtype)
            self.model = build_model(spec, WeightSource(checkpoint, self._place), scheme)
            self.model.prepare(max_len, self._place)
        else:
            from headrace.quant.cpu import bind_cpu

            scheme = bind_cpu(num_threads, mode)
            self.model = build_model(spec, WeightSource(checkpoint), scheme)
        self._layers = self.model.attention_layers

    @torch.no_grad()
    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states after the final norm [B, L, H] of tokens int64 [B, L]; what lies behind a text's end in its
        line pads it."""
        batch, length = tokens.shape
        positions = torch.arange(length, dtype=torch.int32).repeat(batch)
        flat = tokens.reshape(-1).to(torch.int32)
        masks: dict[int, torch.Tensor] = {}

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            settings = self._layers[layer]
            q, k, v = (
                torch.as_tensor(each).reshape(batch, length, -1, settings.head_dim).transpose(1, 2)
                for each in (q, k, v)
            )
            window = settings.window
            mask = None
            if window is not None and window < length:
                if window not in masks:
                    masks[window] = _window_mask(length, window, q.device)
                mask = masks[window]
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=settings.scale, enable_gqa=True
            )
            flat_mixed = mixed.transpose(1, 2).reshape(batch * length, -1)
            return flat_mixed if self._on_gpu else flat_mixed.numpy()

        hidden = self.model.forward(self._ids(flat), self._ids(positions), attend)
        return torch.as_tensor(hidden).reshape(batch, length, -1)

    @torch.no_grad()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The model's embedding [..., H] of tokens."""
        vectors = self.model.embedding(self._ids(tokens.reshape(-1).to(torch.int32)))
        return torch.as_tensor(vectors).reshape(*tokens.shape, -1)

    @torch.no_grad()
    def probabilities(self, hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(probabilities of the tokens `ids` [N, D], the likeliest of all tokens int64 [N]) of hidden states [N, H]."""
        parts, best = [], []
        for chunk in hidden.split(_LOGIT_CHUNK):
            logits = self._logits(chunk)
            total = torch.logsumexp(logits, -1, keepdim=True)
            parts.append(torch.exp(logits[:, ids] - total).to(self.dtype))
            best.append(logits.argmax(-1))
        return torch.cat(parts), torch.cat(best)

    @torch.no_grad()
    def output_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [D, H] of the model's output matrix."""
        head = self.model.head
        return torch.as_tensor(head.method.rows(head.weight, self._ids(ids.to(torch.int32)))).float().clone()

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._on_gpu:
            return self.model.logits(hidden.to(self.dtype)).float()
        return torch.from_numpy(self.model.logits(np.ascontiguousarray(hidden.float().numpy())))

    def _ids(self, ids: torch.Tensor) -> Any:
        return ids.to(self.device) if self._on_gpu else ids.numpy()

    def _place(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(array)).to(self.device)


def _window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """bool [L, L]: which positions see which."""
    at = torch.arange(length, device=device)
    behind = at[:, None] - at[None]
    return (behind >= 0) & (behind < window)
