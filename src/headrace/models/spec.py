"""What a model is, independent of where its weights come from: the facts layers, memory plan and cost model need.

A `ModelSpec` is read from a Hugging Face `config.json` or from GGUF metadata (`loading/hf_config.py`,
`loading/gguf_spec.py`) and never changes afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021) and how it is stretched for long contexts.

    `kind` is one of default, linear, dynamic, yarn, llama3, longrope; an unknown kind is refused where it is read.
    """

    theta: float = 10_000.0
    kind: str = "default"
    rotary_dim: int | None = None  # leading dimensions of a head that rotate; None: all
    factor: float = 1.0
    original_max_position: int | None = None
    attention_factor: float | None = None  # yarn, longrope: None means derived from `factor`
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn (DeepSeek)
    mscale_all_dim: float | None = None  # yarn (DeepSeek)
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()  # longrope
    divisors: tuple[float, ...] = ()  # GGUF `rope_freqs.weight`: inverse frequencies are divided by these


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and switches of a decoder-only transformer."""

    family: str  # key of models/registry.py: llama, mistral, qwen2, qwen3 ...
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    rope: RopeSpec = field(default_factory=RopeSpec)
    activation: str = "silu"  # silu, gelu, gelu_tanh
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # attention output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before rotation
    windows: tuple[int | None, ...] = ()  # sliding window of each layer in tokens; None: full attention; () = all full
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()  # union of every place that names one

    def __post_init__(self) -> None:
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"windows names {len(self.windows)} layers, the model has {self.num_layers}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly")

    def window(self, layer: int) -> int | None:
        """Sliding window of `layer` in tokens, or None for full attention."""
        return self.windows[layer] if self.windows else None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
