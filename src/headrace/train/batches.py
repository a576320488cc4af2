"""Texts as batches with the model's features, which are computed when a text comes first and kept as memory allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.train.target import Target
from headrace.train.texts import Text


@dataclass(frozen=True)
class Batch:
    """B texts of at most L tokens, and what the model made of them."""

    embedded: torch.Tensor  # [B, L, H]
    features: torch.Tensor  # [B, L, H]
    place: torch.Tensor  # int64 [B, L]  of a position that is to be guessed its line in the two below, else -1
    wanted: torch.Tensor  # [N, D]  the model's probabilities of the tokens that can be drafted, at those positions
    best: torch.Tensor  # int64 [N]  the likeliest of them; -1: of all tokens it is another


class Batches:
    """Batches of texts of similar length."""

    def __init__(
        self,
        target: Target,
        texts: Sequence[Text],
        draft_ids: np.ndarray,
        batch_tokens: int,
        cache_bytes: float,
        seed: int = 0,
        late_start: float = 0.0,
    ):
        """`draft_ids` int64 [D]: the tokens that can be drafted. `cache_bytes`: for features that are kept.
        `late_start`: part of the texts whose first tokens are left out, in shuffled passes; heads see no others' then,
        as in an engine that found them in its prefix cache."""
        self._target, self._texts, self._batch_tokens = target, texts, batch_tokens
        self._ids = torch.from_numpy(draft_ids).to(target.device)
        self._draft_of = torch.full((target.spec.vocab_size,), -1, dtype=torch.int64, device=target.device)
        self._draft_of[self._ids] = torch.arange(len(draft_ids), device=target.device)
        self._kept: dict[int, torch.Tensor] = {}
        self._room = cache_bytes
        self._late_start = late_start
        self._random = np.random.default_rng(seed)
        self._lengths = np.array([len(text.tokens) for text in texts])

    def one_pass(self, shuffled: bool = True) -> Iterator[Batch]:
        """Every text once."""
        for chosen in self.cut(shuffled):
            yield self._make(chosen, self._late_start if shuffled else 0.0)

    def cut(self, shuffled: bool = True) -> list[list[int]]:
        """Indices of the texts of each batch."""
        jitter = self._random.random(len(self._texts)) * 32 if shuffled else 0.0
        batches: list[list[int]] = []
        longest = 0
        for index in np.argsort(self._lengths + jitter, kind="stable").tolist():
            longest = max(longest, int(self._lengths[index]))
            if not batches or longest * (len(batches[-1]) + 1) > self._batch_tokens:
                batches.append([])
                longest = int(self._lengths[index])
            batches[-1].append(index)
        if shuffled:
            self._random.shuffle(batches)
        return batches

    def _make(self, chosen: list[int], late_start: float) -> Batch:
        length = max(len(self._texts[index].tokens) for index in chosen)
        tokens = np.zeros((len(chosen), length), np.int64)
        guessed = np.zeros((len(chosen), length), bool)
        for line, index in enumerate(chosen):
            text = self._texts[index]
            tokens[line, : len(text.tokens)] = text.tokens
            guessed[line, text.prompt_len - 1 : len(text.tokens) - 1] = True
        features = self._features(chosen, tokens)
        if late_start:
            first = self._first_places(chosen, late_start)
            moved = np.minimum(np.arange(length) + first[:, None], length - 1)  # a line's end is repeated, as padding
            tokens = np.take_along_axis(tokens, moved, 1)
            guessed = np.take_along_axis(guessed, moved, 1) & (np.arange(length) + first[:, None] < length)
            places = torch.from_numpy(moved).to(features.device)
            features = features[torch.arange(len(chosen), device=features.device)[:, None], places]
        at = torch.from_numpy(guessed).to(self._target.device)
        place = torch.full(at.shape, -1, dtype=torch.int64, device=at.device)
        place[at] = torch.arange(int(guessed.sum()), device=at.device)
        wanted, best = self._target.probabilities(features[at], self._ids)
        embedded = self._target.embed(torch.from_numpy(tokens))
        return Batch(embedded, features, place, wanted, self._draft_of[best])

    def _first_places(self, chosen: list[int], late_start: float) -> np.ndarray:
        """Where each text begins for this pass, int64 [B]: some of them anywhere up to their prompt's last token."""
        late = self._random.random(len(chosen)) < late_start
        prompt_lens = np.array([self._texts[index].prompt_len for index in chosen])
        return np.where(late, self._random.integers(0, prompt_lens), 0)

    def _features(self, chosen: list[int], tokens: np.ndarray) -> torch.Tensor:
        """[B, L, H]; only texts that are not kept are run. Of kept ones, zeros lie behind the end."""
        new = [line for line, index in enumerate(chosen) if index not in self._kept]
        shape = (*tokens.shape, self._target.spec.hidden_size)
        features = torch.zeros(shape, dtype=self._target.dtype, device=self._target.device)
        for line, index in enumerate(chosen):
            if (kept := self._kept.get(index)) is not None:
                features[line, : len(kept)] = kept
        if not new:
            return features
        made = self._target.hidden(torch.from_numpy(tokens[new])).to(features.dtype)
        features[torch.tensor(new, device=features.device)] = made
        small = torch.bfloat16 if features.dtype == torch.bfloat16 else torch.float16
        for line in new:
            count = len(self._texts[chosen[line]].tokens)
            size = count * features.shape[-1] * 2
            if size <= self._room:
                self._room -= size
                self._kept[chosen[line]] = features[line, :count].to(small).clone()
        return features


def frequent_tokens(texts: Sequence[Text], count: int, vocab_size: int) -> tuple[np.ndarray, float]:
    """The `count` tokens that the model wrote most often, sorted, int64 [count]; and the part of what it wrote that
    they are."""
    seen = np.zeros(vocab_size, np.int64)
    for text in texts:
        np.add.at(seen, text.tokens[text.prompt_len :], 1)
    count = min(count, vocab_size)
    order = np.argsort(-seen, kind="stable")[:count]
    return np.sort(order).astype(np.int64), float(seen[order].sum() / max(1, seen.sum()))
