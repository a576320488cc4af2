"""Opening a draft model beside the model whose tokens it drafts."""

from __future__ import annotations

from pathlib import Path

from headrace.config import ConfigError
from headrace.core.kv_layout import KVLayout
from headrace.frontend.tokenizer import Tokenizer
from headrace.loading.checkpoint import LoadedCheckpoint, open_checkpoint
from headrace.loading.draft_heads import HeadCheckpoint, is_head
from headrace.loading.store import resolve_model
from headrace.worker.drafting import DraftSource, HeadKind


def open_draft(name: str | None) -> LoadedCheckpoint | HeadCheckpoint | None:
    """The checkpoint of the draft model or head, if there is to be one. CheckpointError as for any model."""
    if name is None:
        return None
    if is_head(Path(name)):
        return HeadCheckpoint(Path(name))
    return open_checkpoint(resolve_model(name))


def draft_source(draft: LoadedCheckpoint | HeadCheckpoint, layout: KVLayout) -> DraftSource:
    """What a worker is given of it."""
    kind = None
    if isinstance(draft, HeadCheckpoint):
        kind = HeadKind(draft.is_eagle3, draft.draft_vocab, draft.taps)
    return DraftSource(draft.spec, draft, layout, kind)


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
