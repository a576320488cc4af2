"""The proposers that the configuration names, made for one worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.attention.select import select_backend
from headrace.config import NETWORKS, EngineConfig
from headrace.core.kv_layout import KVLayout
from headrace.layers.weights import Checkpoint, WeightSource
from headrace.models.blocks import CausalLM, Parts
from headrace.models.draft_heads import Eagle1Head, Eagle3Head, EagleHead
from headrace.models.medusa import MedusaHeads, MedusaKind
from headrace.models.mlp_speculator import MlpKind, MlpSpeculator
from headrace.models.mtp import MtpHead
from headrace.models.registry import LAYERS, build_model
from headrace.models.spec import ModelSpec
from headrace.quant.base import QuantScheme
from headrace.quant.packed import Packed
from headrace.sampling.grammar import GrammarCompiler, GrammarTokens
from headrace.sampling.residual import ResidualSampler, SyntheticSampler
from headrace.sampling.sampler import Sampler
from headrace.sampling.stages import default_stages
from headrace.spec.base import Proposer
from headrace.spec.combined import CombinedProposer
from headrace.spec.draft_model import DraftModelProposer
from headrace.spec.draft_runner import DraftRunner
from headrace.spec.eagle import HeadRunner
from headrace.spec.ngram import NgramProposer
from headrace.spec.parallel_draft import ParallelDraftRunner
from headrace.spec.state_heads import StateRunner
from headrace.spec.suffix import SuffixProposer
from headrace.spec.synthetic import SyntheticProposer

_GROUP = 32  # weights that share a scale in the 8-bit format of heads


@dataclass(frozen=True)
class HeadKind:
    """Which EAGLE head it is."""

    is_eagle3: bool
    draft_vocab: int  # tokens of its output
    taps: tuple[int, ...] | None  # layers whose features it takes, if it says so


@dataclass(frozen=True)
class MtpKind:
    """What the model's own module for multi-token prediction is like."""

    feature_first: bool  # its projection takes the feature before the embedding


@dataclass(frozen=True)
class DraftSource:
    """A second model, a head that continues features, or heads that begin at the last hidden state, which draft."""

    spec: ModelSpec
    checkpoint: Checkpoint
    layout: KVLayout  # of its own cache
    head: HeadKind | MtpKind | None = None
    states: MedusaKind | MlpKind | None = None  # of heads that begin at the last hidden state
    mask_token: int | None = None  # of a model that guesses all tokens of a draft at once


def make_sampler(config: EngineConfig, grammars: GrammarCompiler | None) -> Sampler:
    """The verifier that the configuration names, with every logits stage there is."""
    sampler = plain_sampler(grammars)
    if config.synthetic_acceptance is not None:
        return SyntheticSampler(config.synthetic_acceptance, sampler)
    return ResidualSampler(sampler.stages) if config.verify == "residual" else sampler


def plain_sampler(grammars: GrammarCompiler | None) -> Sampler:
    """What networks draw their drafts with: every logits stage there is."""
    return Sampler(default_stages([GrammarTokens(grammars)] if grammars is not None else []))


def make_proposer(
    config: EngineConfig,
    target: CausalLM,
    scheme: QuantScheme,
    grammars: GrammarCompiler | None,
    draft: DraftSource | None,
) -> CombinedProposer:
    """All of config.proposers, in that order, for the model that verifies."""

    def make_draft_model() -> Proposer:
        if draft is None:
            raise ValueError("the configuration has a draft model, but none was opened")
        layout, source = draft.layout, WeightSource(draft.checkpoint)
        heads_scheme = _scheme_of_heads(config, scheme, draft.spec)
        runner: DraftRunner | HeadRunner | StateRunner
        if draft.states is not None:
            runner = StateRunner(state_heads(source, heads_scheme, target, draft.states))
            source.finish()
        elif draft.head is None:
            model = build_model(draft.spec, source, scheme)
            backend, _ = select_backend("cpu", layout.kv_format, model.attention_layers, layout.block_size)
            if draft.mask_token is None:
                runner = DraftRunner(model, layout, backend, config.max_num_seqs, config.max_model_len)
            else:
                runner = ParallelDraftRunner(
                    model, layout, backend, config.max_num_seqs, config.max_model_len, draft.mask_token
                )
        else:
            head = build_head(Parts(draft.spec, source, heads_scheme), target, draft.head)
            backend, _ = select_backend("cpu", layout.kv_format, head.attention_layers, layout.block_size)
            runner = HeadRunner(head, layout, backend, config.max_num_seqs, config.max_model_len)
            target.taps = head.taps
        return DraftModelProposer(
            runner,
            plain_sampler(grammars),
            config.max_draft_tokens,
            target.spec.vocab_size,
            residual=config.verify == "residual",
        )

    return combine(config, make_draft_model)


def combine(config: EngineConfig, make_network: Callable[[], Proposer]) -> CombinedProposer:
    """All of config.proposers, in that order; `make_network` makes the one that runs a network, if there is one."""

    def make(name: str) -> Proposer:
        if name == "suffix":
            return SuffixProposer(config.max_draft_tokens, config.suffix_tokens)
        if name == "ngram":
            return NgramProposer(config.max_draft_tokens)
        if name in NETWORKS:
            return make_network()
        if name == "synthetic":
            return SyntheticProposer(config.max_draft_tokens)
        raise ValueError(f"no proposer is called {name}")

    return CombinedProposer([(name, make(name)) for name in config.proposers])


def _scheme_of_heads(config: EngineConfig, scheme: QuantScheme, spec: ModelSpec) -> QuantScheme:
    """How weights of heads are stored. They are read for every draft, and a guess may be rounded: with 8 bits, but for
    exact mode and for sizes that do not divide."""
    sizes = (spec.hidden_size, spec.intermediate_size, spec.q_size)
    if config.mode == "exact" or not isinstance(scheme, Packed) or any(size % _GROUP for size in sizes):
        return scheme
    return Packed(config.mode, "q8")


def state_heads(
    source: WeightSource, scheme: QuantScheme, target: CausalLM, kind: MedusaKind | MlpKind
) -> MedusaHeads | MlpSpeculator:
    """Heads that begin at the last hidden state of `target`."""
    if isinstance(kind, MedusaKind):
        return MedusaHeads(source, scheme, target, kind)
    return MlpSpeculator(source, scheme, target, kind)


def build_head(parts: Parts, target: CausalLM, kind: HeadKind | MtpKind) -> EagleHead:
    """The head of a draft's folder, for the model `target`."""
    head: EagleHead
    if isinstance(kind, MtpKind):
        head = MtpHead(parts, target, LAYERS[parts.spec.family], kind.feature_first)
    else:
        head = Eagle3Head(parts, target, kind.draft_vocab, kind.taps) if kind.is_eagle3 else Eagle1Head(parts, target)
    parts.source.finish()
    return head
