"""Tokenizer: text to token ids and back, and text as it streams. Over the `tokenizers` library.

A token is some bytes; text is those bytes in a row, read as UTF-8, where bytes that form no character become U+FFFD.
`decode` and `IncrementalDetokenizer` share that definition, so the pieces of a stream always add up to `decode(ids)`.
For valid text it is what transformers decodes. It differs where transformers gives odd answers: a broken run of byte
tokens is one U+FFFD per broken sequence (not per byte of the whole run), and `clean_up_tokenization_spaces` is never
applied, since it deletes spaces that the model wrote.

Control tokens in a user's text (`<|im_end|>` typed into a chat) become control tokens, exactly as transformers'
`apply_chat_template` does it; `encode(..., parse_special=False)` reads them as plain text. Text that a chat template
printed is encoded with `add_special=False`: the template prints the beginning-of-sequence token if it wants one.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.loading.errors import CheckpointError
from headrace.loading.json_file import read_json

if TYPE_CHECKING:
    import tokenizers

    from headrace.loading.gguf_file import GGUFFile

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Made by `from_folder` or `from_gguf`. `special_tokens` maps bos_token, eos_token ... to their text."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
    ):
        self._backend = backend
        self._plain_backend: tokenizers.Tokenizer | None = None  # the same, blind to special tokens in the text
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})  # "default", "tool_use" ...
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(id for id, token in added.items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self._pieces = _Pieces(backend, {id: token.content for id, token in added.items()})

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """From tokenizer.json and, where there is one, tokenizer_config.json and chat_template.jinja."""
        import tokenizers

        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} has no tokenizer.json; fetch the model's tokenizer files as well")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path}: is not a usable tokenizer: {error}") from None
        backend.no_padding()
        backend.no_truncation()
        config = read_json(folder / "tokenizer_config.json", missing_ok=True)
        extra = read_json(folder / "special_tokens_map.json", missing_ok=True)
        names = {}
        for name in SPECIAL_NAMES:
            value = config.get(name, extra.get(name))
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                names[name] = text
        # An explicit wish outranks what tokenizer.json does by itself (transformers 5 ignores the wish).
        if "add_bos_token" in config or "add_eos_token" in config:
            set_affixes(
                backend,
                names.get("bos_token") if config.get("add_bos_token") else None,
                names.get("eos_token") if config.get("add_eos_token") else None,
            )
        return cls(backend, special_tokens=names, chat_templates=read_chat_templates(folder))

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """From the vocabulary in a GGUF file's metadata."""
        from headrace.frontend.gguf_tokenizer import build

        backend, names = build(file)
        return cls(backend, special_tokens=names, chat_templates=gguf_chat_templates(file))

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, if it has one."""
        return self.chat_templates.get("default")

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special` adds the beginning (and end) token that this model wants around raw text; pass False for text
        from a chat template. `parse_special=False` reads control tokens in the text as plain text.
        """
        backend = self._backend if parse_special else self._blind()
        try:
            return backend.encode(text, add_special_tokens=add_special).ids
        except (TypeError, UnicodeEncodeError):
            if not isinstance(text, str):
                raise
            raise ValueError("the text holds half of a surrogate pair, which is no character; remove it") from None

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids outside the vocabulary have no text."""
        stream = self.detokenizer(skip_special_tokens)
        return stream.add(ids) + stream.finish()

    def detokenizer(
        self, skip_special_tokens: bool = True, kept: frozenset[int] = frozenset()
    ) -> IncrementalDetokenizer:
        """A new stream whose pieces add up to what `decode` gives; special tokens in `kept` are never skipped."""
        return IncrementalDetokenizer(self._pieces, self.special_ids - kept if skip_special_tokens else frozenset())

    def token_bytes(self, id: int) -> bytes:
        """The bytes one token contributes to the text, before any stripping at its start."""
        return self._pieces[id]

    def to_json(self) -> str:
        """The tokenizer as the `tokenizers` library writes it."""
        return str(self._backend.to_str())

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact spelling in the vocabulary."""
        return self._backend.token_to_id(token)

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _blind(self) -> tokenizers.Tokenizer:
        if self._plain_backend is None:
            import tokenizers

            plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
            plain.encode_special_tokens = True
            self._plain_backend = plain
        return self._plain_backend


class IncrementalDetokenizer:
    """Text of a growing list of tokens. Text once given is never taken back; unfinished characters wait."""

    def __init__(self, pieces: _Pieces, skipped: frozenset[int]):
        self._pieces = pieces
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._to_strip = pieces.strip  # leading spaces of the text that still have to go
        self._first = True

    def add(self, ids: Iterable[int]) -> str:
        """Text that these further tokens complete, possibly empty."""
        pieces, skipped, parts = self._pieces, self._skipped, []
        if self._first:
            ids = iter(ids)
            for id in ids:
                data = pieces[id]
                if id in pieces.known and id not in skipped:
                    self._first = False
                    parts.append(pieces.as_first(data))
                    break
        if pieces.separator:
            shown = ((id, pieces[id]) for id in ids if id not in skipped)
            parts += [pieces.separator + data if id in pieces.known else data for id, data in shown]
        else:
            parts += [pieces[id] for id in ids if id not in skipped]
        return self._strip(self._decoder.decode(b"".join(parts)))

    def finish(self) -> str:
        """The rest: U+FFFD for a character that was begun and never finished."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != " ":
                self._to_strip = 0
            else:
                text = text[1:]
                self._to_strip -= 1
        return text


class _Pieces(dict[int, bytes]):
    """Bytes of each token, found when first asked for; {} for an id outside the vocabulary.

    What the library's decoder would do is read off its description: `strip` leading spaces of the text, `separator`
    between tokens, and how a token's spelling maps to bytes.
    """

    def __init__(self, backend: tokenizers.Tokenizer, added: dict[int, str]):
        super().__init__()
        self._backend = backend
        self._added = added
        self.known: set[int] = set()
        self.strip = 0
        self.separator = b""
        self._byte_level = self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self._first_drops: str | None = None
        decoder = backend.decoder
        if decoder is None:
            self.separator = b" "
            return
        described = json.loads(decoder.__getstate__())
        steps = described["decoders"] if described["type"] == "Sequence" else [described]
        fused = False
        for step in steps:
            kind = step["type"]
            if kind == "ByteLevel":
                self._byte_level = True
            elif kind == "ByteFallback":
                self._byte_fallback = True
            elif kind == "Fuse":
                fused = True
            elif kind == "Replace" and "String" in step["pattern"]:
                self._replacements.append((step["pattern"]["String"], step["content"]))
            elif kind == "Strip" and fused and step["content"] == " " and not step["stop"]:
                self.strip += step["start"]
            elif kind == "Metaspace":
                self._replacements.append((step["replacement"], " "))
                if step.get("prepend_scheme", "always") != "never":
                    self._first_drops = " "
            else:
                raise CheckpointError(f"the tokenizer's decoder step {kind} is not supported")

    def __missing__(self, id: int) -> bytes:
        token = self._backend.id_to_token(id) if 0 <= id < 1 << 32 else None
        data = b"" if token is None else self._bytes(id, token)
        if token is not None:
            self.known.add(id)
            self[id] = data  # ids outside the vocabulary are not kept: there is no end to them
        return data

    def as_first(self, data: bytes) -> bytes:
        """What the first token of a text contributes."""
        return data.replace(b" ", b"") if self._first_drops else data

    def _bytes(self, id: int, token: str) -> bytes:
        if self._byte_level:
            if id in self._added:
                return token.encode()  # as it is spelt: added tokens are outside the byte alphabet
            table = byte_alphabet()
            try:
                return bytes([table[char] for char in token])
            except KeyError:
                return token.encode()
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


_BYTE_ALPHABET: dict[str, int] = {}


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2): itself, or one from U+0100 on."""
    if not _BYTE_ALPHABET:
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        hidden = [byte for byte in range(256) if byte not in printable]
        table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
        _BYTE_ALPHABET.update(table)
    return _BYTE_ALPHABET


def set_affixes(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `add_special` put exactly these tokens around a text."""
    from tokenizers.processors import TemplateProcessing

    single = [token for token in (bos, "$A", eos) if token is not None]
    special = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    for token, id in special:
        if id is None:
            raise CheckpointError(f"the tokenizer's vocabulary lacks its own special token {token!r}")
    backend.post_processor = TemplateProcessing(single=single, special_tokens=special)


def read_chat_templates(folder: str | Path) -> dict[str, str]:
    """Chat templates of a Hugging Face folder by name.

    chat_template.jinja and additional_chat_templates/*.jinja replace those in tokenizer_config.json, which holds a
    string or a list of {name, template}; chat_template.json is the oldest place.
    """
    folder = Path(folder)
    templates: dict[str, str] = {}
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text("utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text("utf-8")
    if templates:
        return templates
    for name in ("tokenizer_config.json", "chat_template.json"):
        value = read_json(folder / name, missing_ok=True).get("chat_template")
        if isinstance(value, str):
            return {"default": value}
        if isinstance(value, dict):
            value = [{"name": key, "template": text} for key, text in value.items()]
        if isinstance(value, Sequence) and value:
            try:
                return {str(entry["name"]): str(entry["template"]) for entry in value}
            except (TypeError, KeyError):
                raise CheckpointError(f"{folder / name}: chat_template must list objects of name, template") from None
    return {}


def gguf_chat_templates(file: GGUFFile) -> dict[str, str]:
    """Chat templates of a GGUF file by name."""
    prefix = "tokenizer.chat_template"
    found = {"default": file.text(prefix)}
    for key in file.metadata:
        if key.startswith(prefix + "."):
            found[key.removeprefix(prefix + ".")] = file.text(key)
    return {name: text for name, text in found.items() if text is not None}
