"""Opening a draft model beside the model whose tokens it drafts."""

from __future__ import annotations

from headrace.config import ConfigError
from headrace.frontend.tokenizer import Tokenizer
from headrace.loading.checkpoint import LoadedCheckpoint, open_checkpoint
from headrace.loading.store import resolve_model


def open_draft(name: str | None) -> LoadedCheckpoint | None:
    """The checkpoint of the draft model, if there is to be one. CheckpointError as for any model."""
    return None if name is None else open_checkpoint(resolve_model(name))


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
