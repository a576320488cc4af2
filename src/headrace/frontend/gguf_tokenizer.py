"""A `tokenizers` pipeline from the vocabulary in GGUF metadata, token for token what the original tokenizer gives.

Two kinds: byte-level BPE (`tokenizer.ggml.model` = gpt2), where `tokenizer.ggml.pre` names how text is split first,
and SentencePiece BPE (llama), whose merges follow from the scores. The names of the splits are those of llama.cpp,
the patterns those of the tokenizer.json files they were made from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.frontend.tokenizer import set_affixes
from headrace.loading.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

    from headrace.loading.gguf_file import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
SPACE = "▁"  # how SentencePiece spells a space

_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _WORDS
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _WORDS
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split before byte-level BPE."""

    pattern: str | None = None  # one split; None: GPT-2's own
    digits: bool = False  # every digit by itself, first
    nfc: bool = False  # normalise to composed characters, as the original tokenizer.json does
    ignore_merges: bool = False  # a piece that is a token is taken whole
    add_bos: bool = False  # where the file does not say


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(digits=True)
_LLAMA_BPE = PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True)
PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "command-r": PreTokenizer(digits=True, nfc=True),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "smaug-bpe": PreTokenizer(_LLAMA3),
    "qwen2": PreTokenizer(_QWEN2, nfc=True),
    "deepseek-r1-qwen": PreTokenizer(_QWEN2),
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, add_bos=True),
}


def build(file: GGUFFile) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The pipeline and the texts of its special tokens (bos_token, eos_token, unk_token, pad_token)."""
    tokens = file.strings("tokenizer.ggml.tokens")
    types = _numbers(file, "tokenizer.ggml.token_type", len(tokens), np.integer)
    model = file.text("tokenizer.ggml.model")
    if model == "gpt2":
        backend, add_bos = _byte_level(file, tokens)
    elif model == "llama":
        backend, add_bos = _sentence_piece(file, tokens)
    else:
        raise CheckpointError(f"{file.path}: the tokenizer {model!r} is not supported (gpt2 and llama are)")
    if types is not None:
        _add_tokens(backend, tokens, types)
    names = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        id = file.integer(f"tokenizer.ggml.{key}_token_id")
        if id is not None:
            if not 0 <= id < len(tokens):
                raise CheckpointError(f"{file.path}: tokenizer.ggml.{key}_token_id {id} is outside the vocabulary")
            names[name] = tokens[id]
    set_affixes(
        backend,
        names.get("bos_token") if file.flag("tokenizer.ggml.add_bos_token", add_bos) else None,
        names.get("eos_token") if file.flag("tokenizer.ggml.add_eos_token", False) else None,
    )
    return backend, names


def _byte_level(file: GGUFFile, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = file.text("tokenizer.ggml.pre", "default")
    pre = PRE_TOKENIZERS.get(str(name))
    if pre is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(f"{file.path}: the pre-tokenizer {name!r} is not supported (these are: {known})")
    merges = []
    for merge in file.strings("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    backend = _backend(
        file, Tokenizer, lambda: models.BPE(_vocab(tokens), merges, ignore_merges=pre.ignore_merges, fuse_unk=False)
    )
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    return backend, pre.add_bos


def _sentence_piece(file: GGUFFile, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _numbers(file, "tokenizer.ggml.scores", len(tokens), np.floating)
    if scores is None:
        raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.scores' is missing")
    unknown = file.integer("tokenizer.ggml.unknown_token_id", 0)
    if unknown is None or not 0 <= unknown < len(tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.unknown_token_id {unknown} is outside the vocabulary")
    vocab = _vocab(tokens)
    backend = _backend(
        file,
        Tokenizer,
        lambda: models.BPE(
            vocab, _merges(vocab, scores.tolist()), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
        ),
    )
    prefix = bool(file.flag("tokenizer.ggml.add_space_prefix", True))
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spaces] if prefix else spaces)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend, True


def _backend(file: GGUFFile, make: Any, model: Any) -> tokenizers.Tokenizer:
    try:
        return make(model())
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file.path}: the vocabulary and merges do not fit together: {error}") from None


def _vocab(tokens: list[str]) -> dict[str, int]:
    """Ids by spelling. Files pad with repeated spellings; the first keeps the name, the others stay countable."""
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocab) == len(tokens):
        return vocab
    vocab = {}
    for id, token in enumerate(tokens):
        vocab[token if token not in vocab else f"{token}\0{id}"] = id
    return vocab


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: every split of a token, best token first."""
    found: list[tuple[float, str, str]] = []
    for token, id in vocab.items():
        pairs = [
            (vocab[left], vocab[right], left, right)
            for cut in range(1, len(token))
            if (left := token[:cut]) in vocab and (right := token[cut:]) in vocab
        ]
        pairs.sort()
        found.extend((-scores[id], left, right) for _, _, left, right in pairs)
    found.sort(key=lambda entry: entry[0])
    return [(left, right) for _, left, right in found]


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: np.ndarray) -> None:
    """Tokens found in the text before it is split: control tokens, and those that the model's makers added."""
    from tokenizers import AddedToken

    for kind, special in ((CONTROL, True), (UNKNOWN, True), (USER_DEFINED, False)):
        texts = [tokens[id] for id in np.flatnonzero(types == kind) if tokens[id]]
        added = [AddedToken(text, special=special, normalized=False) for text in texts]
        if added:
            backend.add_special_tokens(added) if special else backend.add_tokens(added)


def _numbers(file: GGUFFile, key: str, count: int, kind: type[Any]) -> np.ndarray | None:
    """An array of numbers that runs parallel to the tokens, or None where it is absent."""
    if key not in file.metadata:
        return None
    values = file.numbers(key)
    if not np.issubdtype(values.dtype, kind):
        raise CheckpointError(f"{file.path}: key {key!r} holds {values.dtype} where {kind.__name__} is needed")
    if len(values) != count:
        raise CheckpointError(f"{file.path}: key {key!r} has {len(values)} entries for {count} tokens")
    return values
