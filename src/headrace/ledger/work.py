"""The least work a step can be: bytes that must move and operations that must be done, from shapes alone.

Nothing is measured here. Held against a machine's rates these counts give the lower bound of a step's time.

Formulas, for T tokens in a step and per layer unless said otherwise:
  linear      2 FLOP per weight and token (Kaplan et al. 2020, section 2.1: forward pass about 2N per token);
              weights: H(q + 2kv) for QKV, qH for the output projection, 3HI for a gated MLP; of E experts of
              which a token uses k, 3HI each, and HE for the router: FLOP count k of them
  attention   4 * head_dim * heads FLOP per visible (query, key) pair: 2 for the score, 2 for the weighted value
              (Dao et al. 2022 count the same product). A span of n tokens from position s sees
              sum over i < n of min(s + i + 1, window) pairs; without a window n*s + n(n+1)/2
  head        2HV FLOP per position whose logits are computed (whole model, not per layer)
  weights     each is read once a step; the head only when logits are computed; of an untied embedding only the
              rows looked up; of experts those that some token chose: 1 - (1 - k/E)^T of them, if all are chosen alike
  KV          a span reads the keys and values it can see once: min(s + n, n + window - 1) tokens; it writes n
  activations in and out of each linear layer, float32, once: an indication, not part of the bound, since they
              mostly stay in the processor's caches
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace.core.kv_layout import KVLayout
from headrace.core.plan import StepPlan
from headrace.models.spec import ModelSpec, MoESpec

_FLOAT32 = 4  # bytes


class StepWork(NamedTuple):
    """What one step must move and compute. A tuple, because one is made every step."""

    num_spans: int = 0
    num_tokens: int = 0
    num_logits: int = 0  # positions whose logits are computed
    bytes_weights: float = 0.0
    bytes_kv_read: float = 0.0
    bytes_kv_write: float = 0.0
    bytes_activations: float = 0.0  # an indication; not in `bytes_total`
    flops_linear: float = 0.0
    flops_attention: float = 0.0
    flops_head: float = 0.0

    @property
    def bytes_total(self) -> float:
        """Bytes that have to cross the memory bus: weights and KV."""
        return self.bytes_weights + self.bytes_kv_read + self.bytes_kv_write

    def times(self, num_runs: int) -> StepWork:
        """That of several such runs."""
        return self if num_runs == 1 else StepWork._make(num_runs * value for value in self)

    @property
    def flops_total(self) -> float:
        return self.flops_linear + self.flops_attention + self.flops_head


class SpanWork(NamedTuple):
    """What each span of a step would be as a step of its own; float64 [S] each."""

    num_tokens: np.ndarray
    bytes_weights: np.ndarray
    bytes_kv: np.ndarray  # read and written
    flops_linear: np.ndarray
    flops_attention: np.ndarray
    flops_head: np.ndarray


def linear_params(spec: ModelSpec) -> int:
    """Weights that a token is multiplied with in all transformer layers: of experts, those it is sent to.

    Biases and norms are left out (under 0.1 %).
    """
    attention = spec.hidden_size * (spec.q_size + 2 * spec.kv_size) + spec.q_size * spec.hidden_size
    dense = 3 * spec.hidden_size * spec.intermediate_size
    if spec.moe is None:
        return spec.num_layers * (attention + dense)
    sparse = spec.num_layers - len(spec.moe.dense_layers)
    routers = sparse * spec.hidden_size * spec.moe.num_experts
    experts = spec.moe.experts_per_token * _one_expert(spec, spec.moe)
    return spec.num_layers * attention + len(spec.moe.dense_layers) * dense + routers + experts


def expert_params(spec: ModelSpec) -> int:
    """Weights of all experts of all layers, used or not."""
    return 0 if spec.moe is None else spec.moe.num_experts * _one_expert(spec, spec.moe)


def stored_params(spec: ModelSpec) -> int:
    """Weights in the linear layers and experts of all transformer layers, used or not."""
    used = 0 if spec.moe is None else spec.moe.experts_per_token * _one_expert(spec, spec.moe)
    return linear_params(spec) - used + expert_params(spec)


def _one_expert(spec: ModelSpec, moe: MoESpec) -> int:
    """Weights of one expert of every layer that has experts."""
    return (spec.num_layers - len(moe.dense_layers)) * 3 * spec.hidden_size * moe.intermediate_size


def num_logits(plan: StepPlan) -> int:
    """Positions of `plan` whose logits are computed: the last token of each span that yields, and its drafts."""
    if plan.num_decodes == plan.num_spans:  # told in less time
        return plan.num_spans
    return int(plan.num_drafts[plan.yields].sum()) + int(np.count_nonzero(plan.yields))


class WorkModel:
    """Counts a step's work for one model as it is loaded. Immutable once made.

    weight_bytes              all weights in memory, a tied matrix counted once
    kv_bytes_per_token_layer  keys and values of one token in one layer; None: float32
    head_bytes                the output head; None: its share of the parameters
    embedding_bytes           an embedding that is not the head's matrix; None: its share, 0 when tied
    The last two are worth giving when they are quantised differently from the layers.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weight_bytes: int,
        *,
        kv_bytes_per_token_layer: float | None = None,
        head_bytes: int | None = None,
        embedding_bytes: int | None = None,
    ) -> None:
        if weight_bytes < 0:
            raise ValueError(f"weight_bytes must not be negative, got {weight_bytes}")
        table = spec.vocab_size * spec.hidden_size
        share = int(weight_bytes * table / (stored_params(spec) + table * (1 if spec.tie_word_embeddings else 2)))
        if kv_bytes_per_token_layer is None:
            kv_bytes_per_token_layer = 2.0 * spec.kv_size * _FLOAT32
        if head_bytes is None:
            head_bytes = share
        if embedding_bytes is None:
            embedding_bytes = 0 if spec.tie_word_embeddings else share
        self.spec = spec
        self.weight_bytes = weight_bytes
        self.kv_bytes_per_token_layer = kv_bytes_per_token_layer
        self.head_bytes = head_bytes
        self.embedding_bytes = embedding_bytes

        windows = [spec.window(layer) for layer in range(spec.num_layers)]
        self._groups = tuple((window, windows.count(window)) for window in dict.fromkeys(windows))  # (window, layers)
        # all that does not depend on the spans, so that `work` is a few products
        self._layer_bytes = float(max(weight_bytes - head_bytes - embedding_bytes, 0))
        self._expert_bytes = self._layer_bytes * expert_params(spec) / stored_params(spec)
        self._unchosen = 0.0 if spec.moe is None else 1.0 - spec.moe.experts_per_token / spec.moe.num_experts
        self._row_bytes = embedding_bytes / spec.vocab_size
        self._linear_flops = 2.0 * linear_params(spec)  # per token, all layers
        self._pair_flops = 4.0 * spec.num_heads * spec.head_dim  # per (query, key) pair and layer
        self._head_flops = 2.0 * table  # per position
        # inputs of QKV, output, gate/up, down: H + q + H + I; outputs: (q + 2kv) + H + 2I + H (of experts: left out)
        per_layer = 4 * spec.hidden_size + 2 * (spec.q_size + spec.kv_size) + 3 * spec.intermediate_size
        self._token_activations = float(_FLOAT32 * spec.num_layers * per_layer)
        self._logit_activations = float(_FLOAT32 * (spec.hidden_size + spec.vocab_size))
        one = np.array([[0], [0], [1], [0]])
        self._decode = self.work(one, 1)._replace(bytes_kv_read=0.0, flops_attention=0.0)

    @classmethod
    def for_layout(cls, spec: ModelSpec, weight_bytes: int, layout: KVLayout) -> WorkModel:
        """A model whose KV cache is cut as `layout` says."""
        return cls(spec, weight_bytes, kv_bytes_per_token_layer=2.0 * spec.kv_size * layout.bytes_per_element)

    def of_plan(self, plan: StepPlan) -> StepWork:
        """Work of a run of the step that `plan` describes."""
        return self.work(plan.spans, num_logits(plan))

    def work(self, spans: np.ndarray, num_logits: int) -> StepWork:
        """Work of `spans` (int [>=3, S]: row, start, length, ... as in a StepPlan) with logits at `num_logits` places.

        Exact while counts stay below 2**53; sums over spans are taken in one product, since steps ask often.
        """
        num_spans = spans.shape[1]
        if num_spans == 0:
            return StepWork()
        columns = np.ones((3, num_spans))
        columns[:2] = spans[1:3]
        (_, by_start, sum_starts), (_, by_length, tokens), _ = (columns @ columns.T).tolist()
        visible = pairs = 0.0  # tokens read and (query, key) pairs, summed over layers
        for window, layers in self._groups:
            if window is None:
                visible += layers * (tokens + sum_starts)
                pairs += layers * (by_start + 0.5 * (by_length + tokens))
                continue
            starts, lengths, ones = columns
            # the first `short` queries of a span see everything before them, the others exactly `window` tokens
            short = np.minimum(np.maximum(window - starts, 0.0), lengths)
            num_short = float(short @ ones)
            visible += layers * (tokens + float(np.minimum(starts, window - 1.0) @ ones))
            seen = float(short @ starts) + 0.5 * (float(short @ short) + num_short)
            pairs += layers * (seen + (tokens - num_short) * window)
        return StepWork(
            num_spans=num_spans,
            num_tokens=int(tokens),
            num_logits=num_logits,
            bytes_weights=self._layer_bytes
            - self._expert_bytes * self._unchosen**tokens
            + (self.head_bytes if num_logits else 0)
            + tokens * self._row_bytes,
            bytes_kv_read=visible * self.kv_bytes_per_token_layer,
            bytes_kv_write=tokens * self.spec.num_layers * self.kv_bytes_per_token_layer,
            bytes_activations=tokens * self._token_activations + num_logits * self._logit_activations,
            flops_linear=tokens * self._linear_flops,
            flops_attention=pairs * self._pair_flops,
            flops_head=num_logits * self._head_flops,
        )

    def each(self, spans: np.ndarray, yields: np.ndarray) -> SpanWork:
        """Work of every span (int [4, S], as in a StepPlan) had it been a step alone. A handful of array operations,
        since it is asked of every step."""
        starts, lengths, drafts = spans[1:4].astype(np.float64)
        logits = (drafts + 1.0) * yields
        visible = np.zeros_like(lengths)
        pairs = np.zeros_like(lengths)
        for window, layers in self._groups:
            if window is None:
                visible += layers * (starts + lengths)
                pairs += layers * lengths * (starts + 0.5 * (lengths + 1.0))
                continue
            short = np.minimum(np.maximum(window - starts, 0.0), lengths)  # as in `work`
            visible += layers * (lengths + np.minimum(starts, window - 1.0))
            pairs += layers * (short * (starts + 0.5 * (short + 1.0)) + (lengths - short) * window)
        weights = lengths * self._row_bytes + (self.head_bytes * yields + self._layer_bytes)
        if self._expert_bytes:
            weights -= self._expert_bytes * self._unchosen**lengths
        return SpanWork(
            num_tokens=lengths,
            bytes_weights=weights,
            bytes_kv=(visible + self.spec.num_layers * lengths) * self.kv_bytes_per_token_layer,
            flops_linear=lengths * self._linear_flops,
            flops_attention=pairs * self._pair_flops,
            flops_head=logits * self._head_flops,
        )

    def decodes(self, starts: np.ndarray) -> tuple[StepWork, np.ndarray]:
        """`each` for spans of one token at `starts`, in less time: the work that all of them share, which is that of a
        decode that reads nothing, and the tokens that each reads, float64 [S], summed over layers. A token read costs
        `read_token` more."""
        visible = np.zeros(len(starts))
        for window, layers in self._groups:
            visible += layers * (starts + 1.0 if window is None else np.minimum(starts + 1.0, window))
        return self._decode, visible

    @property
    def read_token(self) -> tuple[float, float]:
        """(bytes, attention FLOP) of one query that looks at one token in one layer."""
        return self.kv_bytes_per_token_layer, self._pair_flops
