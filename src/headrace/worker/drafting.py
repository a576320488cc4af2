"""The proposers that the configuration names, made for one worker."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config import EngineConfig
from headrace.core.kv_layout import KVLayout
from headrace.layers.weights import Checkpoint
from headrace.models.spec import ModelSpec
from headrace.sampling.grammar import GrammarCompiler
from headrace.spec.base import Proposer
from headrace.spec.combined import CombinedProposer
from headrace.spec.ngram import NgramProposer
from headrace.spec.suffix import SuffixProposer


@dataclass(frozen=True)
class DraftSource:
    """A second model, which drafts."""

    spec: ModelSpec
    checkpoint: Checkpoint
    layout: KVLayout  # of its own cache


def make_proposer(
    config: EngineConfig, spec: ModelSpec, grammars: GrammarCompiler | None, draft: DraftSource | None
) -> CombinedProposer:
    """All of config.proposers, in that order."""

    def make(name: str) -> Proposer:
        if name == "suffix":
            return SuffixProposer(config.max_draft_tokens, config.suffix_tokens)
        if name == "ngram":
            return NgramProposer(config.max_draft_tokens)
        raise ValueError(f"no proposer is called {name}")

    return CombinedProposer([(name, make(name)) for name in config.proposers])
