"""Opening a draft model beside the model whose tokens it drafts."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from headrace.config import ConfigError, EngineConfig
from headrace.core.kv_layout import KVLayout
from headrace.device.cpu import CpuFacts
from headrace.frontend.tokenizer import Tokenizer
from headrace.loading.checkpoint import LoadedCheckpoint, open_checkpoint
from headrace.loading.draft_heads import HeadCheckpoint, MedusaCheckpoint, MlpCheckpoint, is_head, is_medusa, is_mlp
from headrace.loading.errors import CheckpointError
from headrace.loading.mtp import MtpCheckpoint
from headrace.loading.released import model_identity, released_heads
from headrace.loading.store import resolve_model
from headrace.models.spec import ModelSpec
from headrace.resolve import Choice, resolve_draft
from headrace.worker.drafting import DraftSource, HeadKind, MedusaKind, MlpKind, MtpKind

_log = logging.getLogger(__name__)

Drafter = LoadedCheckpoint | HeadCheckpoint | MedusaCheckpoint | MlpCheckpoint | MtpCheckpoint


def open_draft(name: str | None, speculate: str, target: LoadedCheckpoint) -> Drafter | None:
    """The checkpoint of the draft model or head, if there is to be one, for the model `target`. CheckpointError as for
    any model."""
    if name is None and speculate in ("auto", "eagle"):
        released = released_heads(target.name, target.num_bytes, model_identity(target))
        if released is None and speculate == "eagle":
            raise ConfigError(f"no EAGLE head comes with Headrace for {target.name}; give draft_model, a head's folder")
        if released is not None:
            try:
                return _opened(str(released))
            except CheckpointError as error:
                if speculate == "eagle":
                    raise
                # nobody asked for this very head, and texts are the same without it
                _log.warning("headrace: the draft heads that come for %s are left out: %s", target.name, error)
    return _own_module(speculate, target) if name is None else _opened(name)


def _opened(name: str) -> Drafter:
    """The checkpoint of a draft model or of heads, by its path or name."""
    if is_medusa(Path(name)):
        return MedusaCheckpoint(Path(name))
    if is_mlp(Path(name)):
        return MlpCheckpoint(Path(name))
    if is_head(Path(name)):
        return HeadCheckpoint(Path(name))
    return open_checkpoint(resolve_model(name))


def _own_module(speculate: str, target: LoadedCheckpoint) -> MtpCheckpoint | None:
    """The module of `target` for multi-token prediction, where it is asked for or may be used."""
    module = target.mtp
    if speculate not in ("auto", "mtp") or (module is None and speculate == "auto"):
        return None
    if module is None:
        raise ConfigError(f"{target.name} has no module for multi-token prediction; take another way to speculate")
    if module.num_modules == 1 and module.has_layer:
        return module
    if speculate == "auto":
        return None
    if module.num_modules > 1:
        raise ConfigError(
            f"{target.name} has {module.num_modules} modules for multi-token prediction, one behind the other; only "
            "one is supported"
        )
    raise ConfigError(f"multi-token prediction is not supported with {module.spec.family} models")


def kind_of(draft: Drafter | None) -> str | None:
    """The proposer that a draft model or head makes."""
    if draft is None:
        return None
    kinds = {MedusaCheckpoint: "medusa", MlpCheckpoint: "mlp", HeadCheckpoint: "eagle", MtpCheckpoint: "mtp"}
    return kinds.get(type(draft), "draft")


def draft_source(
    draft: Drafter, spec: ModelSpec, config: EngineConfig, layout: KVLayout, facts: CpuFacts
) -> tuple[DraftSource, list[Choice]]:
    """What a worker is given of it, beside a model of `spec` with a cache of `layout`; ConfigError if it does not
    fit."""
    if isinstance(draft, MedusaCheckpoint | MlpCheckpoint):  # heads without layers: nothing of theirs is cached
        states: MedusaKind | MlpKind
        if isinstance(draft, MedusaCheckpoint):
            tokens = draft.draft_vocab or spec.vocab_size
            states = MedusaKind(draft.num_heads, draft.num_blocks, tokens, draft.paths)
        else:
            states = MlpKind(draft.num_heads, draft.state_size, draft.inner_size, draft.vocab_size, draft.scale_input)
        return DraftSource(replace(spec, num_layers=1, windows=()), draft, layout, states=states), []
    cut, choice = resolve_draft(config, layout, draft.spec, draft.num_bytes, facts)
    kind: HeadKind | MtpKind | None = None
    if isinstance(draft, HeadCheckpoint):
        kind = HeadKind(draft.is_eagle3, draft.draft_vocab, draft.taps)
    elif isinstance(draft, MtpCheckpoint):
        kind = MtpKind(draft.feature_first)
    mask_token = getattr(draft, "mask_token", None)
    return DraftSource(draft.spec, draft, cut, kind, mask_token=mask_token), [choice]


def check_same_tokens(tokenizer: Tokenizer, draft: LoadedCheckpoint) -> None:
    """ConfigError unless every token of the model is, to the byte, the draft model's token of the same id."""
    other = draft.tokenizer()
    if tokenizer.to_json() == other.to_json():
        return
    why = f"draft_model {draft.name} cannot draft for this model: its tokens are others"
    counts = tokenizer.vocab_size, other.vocab_size
    if counts[0] != counts[1]:
        raise ConfigError(f"{why} ({counts[1]} of them, not {counts[0]}); take one of the same family")
    for token in range(tokenizer.vocab_size):
        own, its = tokenizer.token_bytes(token), other.token_bytes(token)
        if own != its:
            raise ConfigError(f"{why} (token {token} is {its!r}, not {own!r}); take one of the same family")
