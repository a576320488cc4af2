"""transformers in fp32 on the weights that Headrace has read: an oracle for tests and a peer for benchmarks.

Needs torch and transformers (the `test` extra).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from headrace.loading.checkpoint import LoadedCheckpoint


class TransformersPeer:
    """A transformers model that generates greedily."""

    def __init__(self, model: Any, name: str):
        self.model = model
        self.name = name

    def run(self, prompts: Sequence[list[int]], num_tokens: int) -> float:
        """Output tokens per second of exactly `num_tokens` greedy tokens for equally long prompts."""
        import torch

        inputs = torch.tensor(prompts)
        started = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                pad_token_id=0,
            )
        return len(prompts) * num_tokens / (time.perf_counter() - started)


def load_peer(checkpoint: LoadedCheckpoint) -> TransformersPeer:
    """The checkpoint's model in transformers, float32; Llama-like families only."""
    import torch
    import transformers

    spec = checkpoint.spec
    if spec.family != "llama" or spec.rope.kind != "default":
        raise ValueError(f"only plain Llama models are compared so far, not {spec.family} with {spec.rope.kind} RoPE")
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.norm_eps,
        max_position_embeddings=spec.max_position,
        tie_word_embeddings=spec.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        eos_token_id=sorted(spec.eos_token_ids),
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    state = {name: torch.tensor(checkpoint.read(name)) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        raise ValueError(f"the weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    # buffers made on the meta device hold nothing: make the rotary embedding again
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return TransformersPeer(model.eval(), f"transformers {transformers.__version__} fp32")
