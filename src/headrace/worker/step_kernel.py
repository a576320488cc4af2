"""StepKernel: whether, and from when on, steps of a few tokens run as one CUDA kernel (ops/cuda)."""

from __future__ import annotations

import sys

import torch

from headrace.config import EngineConfig
from headrace.core.kv_layout import KVLayout
from headrace.core.plan import StepPlan
from headrace.models.blocks import CausalLM
from headrace.models.spec import ModelSpec
from headrace.ops.cuda.library import Build, BuildError, StepLibrary, find_compiler, unavailable
from headrace.ops.cuda.shape import MOST_ROWS, SLICE, StepShape, measured_rows
from headrace.worker.device_batch import DeviceBatch
from headrace.worker.device_cache import DeviceKVCache
from headrace.worker.graphs import GraphKey
from headrace.worker.whole_step import WholeStep

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
# bytes of keys and values that the tokens of a step may read, one by one, of which all but a span's first comes from
# the L2 cache: at 5 TB/s they take as long as the kernel gains with small models
_MOST_CONTEXT = 1 << 30


def refusals(spec: ModelSpec, dtype: str, invariant: bool) -> list[str]:
    """Every reason why no kernel can run a whole step of this model; empty when one can."""
    reasons = []
    if dtype != "bfloat16":
        reasons.append(f"computes in bfloat16, not {dtype}")
    if invariant:
        reasons.append("is not invariant")
    if spec.family not in ("llama", "mistral", "phi3", "qwen2", "qwen3"):
        reasons.append(f"knows layers like a Llama's, not those of {spec.family}")
    if spec.moe is not None:
        reasons.append("has no experts")
    if any(window is not None for window in spec.windows):
        reasons.append("has no sliding window")
    if spec.attention_soft_cap is not None or spec.logit_soft_cap is not None:
        reasons.append("has no soft cap")
    if spec.attention_sinks:
        reasons.append("has no attention sinks")
    if spec.qk_norm_whole:
        reasons.append("norms heads one by one")
    if spec.output_bias or spec.mlp_bias:
        reasons.append("has biases of q, k and v alone")
    if spec.activation not in _ACTIVATIONS:
        reasons.append(f"has no activation {spec.activation}")
    if spec.head_dim not in (64, 128):
        reasons.append(f"has heads of 64 or 128, not {spec.head_dim}")
    if spec.num_heads // spec.num_kv_heads > 16:
        reasons.append("lets at most 16 query heads share a key head")
    for name, size in (("hidden size", spec.hidden_size), ("intermediate size", spec.intermediate_size)):
        if size % SLICE:
            reasons.append(f"needs a multiple of {SLICE}, not the {name} {size}")
    return reasons


def shape_of(spec: ModelSpec, block_size: int) -> StepShape:
    """What a kernel is built for, of a model that `refusals` has nothing against."""
    rotating = spec.head_dim if spec.rope.rotary_dim is None else spec.rope.rotary_dim
    return StepShape(
        hidden=spec.hidden_size, inner=spec.intermediate_size, heads=spec.num_heads, kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, half=rotating // 2, page=block_size, bias=int(spec.qkv_bias),
        qk_norm=int(spec.qk_norm), gelu=_ACTIVATIONS[spec.activation],
    )  # fmt: skip


class StepKernel:
    """The kernel of one model, once it is compiled; until then it serves nothing."""

    def __init__(
        self, build: Build, limit: int, model: CausalLM, cache: DeviceKVCache, vocab_size: int | None = None
    ):
        """Steps of up to `limit` tokens are served; logits are of the first `vocab_size` tokens."""
        self._build: Build | None = build
        self._limit, self._model, self._cache = limit, model, cache
        self._vocab_size = vocab_size
        self._context_bytes = cache.layout.block_bytes / cache.layout.block_size  # of a token
        self._whole: WholeStep | None = None
        self.failure: str | None = None
        self.arrives()

    def arrives(self) -> bool:
        """Whether the kernel can be used from now on and could not before. Where it turns out that it never will be,
        that is said once."""
        build = self._build
        try:
            if build is None or not build.ready():
                return False
            self._build = None
            library = StepLibrary(build.path)
            whole = WholeStep(library, build.shape, self._model, self._cache.pages, vocab_size=self._vocab_size)
            whole.try_launch()
            self._limit, self._whole = min(self._limit, whole.most_rows), whole
        except (BuildError, RuntimeError, ValueError) as error:
            self._build, self.failure = None, str(error)
            print(f"headrace: no kernel for whole steps: {error}", file=sys.stderr)
            return False
        return True

    @property
    def state(self) -> str:
        """For a person."""
        if self.failure is not None:
            return "off"
        return f"up to {self._limit} tokens" if self._whole is not None else "being compiled"

    def serves(self, key: GraphKey) -> bool:
        """Whether steps padded to this size are to run in the kernel."""
        chains = key.decodes or (key.short and not key.tree and not key.far)
        return self._whole is not None and chains and key.num_tokens <= self._limit

    def too_far(self, plan: StepPlan) -> bool:
        """Whether contexts are so long that tokens of a span had better read them together, which the kernel does not:
        each reads all of it."""
        if self._whole is None or plan.num_tokens > self._limit:
            return False  # no step for it: graphs of one size need not be of two kinds
        return bool(plan.lengths @ plan.starts * self._context_bytes > _MOST_CONTEXT)

    def logits(self, batch: DeviceBatch) -> torch.Tensor:
        """float32 [T, V] of a padded step of T tokens whose inputs are in place; see WholeStep."""
        assert self._whole is not None
        span_of = None if batch.lines.num_drafts is None else batch.lines.span_of  # every token has a line
        return self._whole.logits(batch.spans, batch.block_tables[0], batch.num_tokens, span_of)

    def hidden(self, num_tokens: int) -> torch.Tensor:
        """See WholeStep."""
        assert self._whole is not None
        return self._whole.hidden(num_tokens)


class StepKernelChoice:
    """What a worker decides of the kernel before it has a model, so that the compiler runs meanwhile."""

    def __init__(self, spec: ModelSpec, config: EngineConfig, layout: KVLayout, device: torch.device):
        self._build: Build | None = None
        self._kernel: StepKernel | None = None
        self._limit = 0
        self._reason = self._why_not(spec, config, device)
        if self._reason is None:
            shape = shape_of(spec, layout.block_size)
            self._limit = MOST_ROWS if config.step_kernel == "on" else measured_rows(shape)
            self._reason = None if self._limit else "not measured to be faster for this shape (step_kernel=on takes it)"
        compiler = find_compiler()
        if self._reason is None and compiler is not None:
            try:
                self._build = Build(shape, compiler)
            except (BuildError, OSError) as error:
                self._reason = str(error)

    @staticmethod
    def _why_not(spec: ModelSpec, config: EngineConfig, device: torch.device) -> str | None:
        if config.step_kernel == "off":
            return "as asked"
        if device.type != "cuda":
            return f"runs on a GPU, not on {device.type}"
        if not config.graphs:
            return "only steps in CUDA graphs use it"
        missing = refusals(spec, config.dtype, config.invariant)
        if (lacking := unavailable(torch.cuda.get_device_capability(device))) is not None:
            missing.append(lacking)
        return "; ".join(missing) or None

    def kernel(self, model: CausalLM, cache: DeviceKVCache, vocab_size: int | None = None) -> StepKernel | None:
        """The kernel for this model and cache, which may still be at the compiler; None: there is none."""
        if self._build is not None and not model.taps:
            self._kernel = StepKernel(self._build, self._limit, model, cache, vocab_size)
        return self._kernel

    @property
    def state(self) -> tuple[str, str]:
        """(what is done, why) for a person."""
        if self._kernel is None:
            return "off", self._reason or "features of several layers are drafted from, which it does not keep"
        return self._kernel.state, self._kernel.failure or "one kernel for a whole step"

    def stop(self) -> None:
        """End a compiler that runs, and let go of the model and the cache."""
        if self._build is not None:
            self._build.stop()
        self._kernel = None
