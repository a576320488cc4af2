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


MOST_LAYERS = 10_000  # more are a damaged file's
MOST_OF_ANYTHING = 2**31 - 1


@dataclass(frozen=True)
class MoESpec:
    """Mixture of experts: how many, how wide, how chosen, in which layers."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    normalise: bool = True  # the chosen experts' weights sum to 1
    router_bias: bool = False
    expert_bias: bool = False
    dense_layers: frozenset[int] = frozenset()  # layers with an ordinary feed-forward block instead

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(f"a token cannot have {self.experts_per_token} of {self.num_experts} experts")


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and switches of a decoder-only transformer."""

    family: str  # key of models/registry.py: llama, qwen3, gemma3 ...
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
    activation: str = "silu"  # key of ops.ACTIVATIONS: silu, gelu, gelu_tanh, swiglu_clamped
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # attention output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of q and k before rotation, over each head ...
    qk_norm_whole: bool = False  # ... or, with this, over all heads at once (OLMo)
    norm_offset: float = 0.0  # added to every stored norm weight (Gemma stores w for 1 + w)
    embedding_scale: float = 1.0  # of token embeddings on their way in, not of a tied head (Gemma)
    attention_scale: float | None = None  # of q . k; None: head_dim ** -0.5
    attention_soft_cap: float | None = None  # cap * tanh(score / cap)
    logit_soft_cap: float | None = None
    attention_sinks: bool = False  # a learned logit per head that takes probability and gives no value
    fused_projections: bool = False  # the checkpoint holds q, k, v as one tensor, gate and up as another (Phi-3)
    windows: tuple[int | None, ...] = ()  # sliding window of each layer in tokens; None: full attention; () = all full
    local_rope: RopeSpec | None = None  # of layers with a window; None: `rope` too
    moe: MoESpec | None = None
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

    def layer_rope(self, layer: int) -> RopeSpec:
        """Rotary embedding of `layer`."""
        return self.rope if self.local_rope is None or self.window(layer) is None else self.local_rope

    def layer_moe(self, layer: int) -> MoESpec | None:
        """The experts of `layer`, or None for an ordinary feed-forward block."""
        return None if self.moe is None or layer in self.moe.dense_layers else self.moe

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
