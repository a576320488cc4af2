"""Prompts for training: files of text or of JSON lines, plain or gzipped, or a folder of such files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import ConfigError

SUFFIXES = (".txt", ".jsonl")


@dataclass(frozen=True)
class Prompt:
    """What the model is to go on from."""

    content: str | list[dict[str, Any]]  # a text, or a conversation
    raw: bool = False  # the text is a beginning, not what a user says to a chat model

    @property
    def key(self) -> str:
        """The same for equal prompts only."""
        return json.dumps([self.content, self.raw], sort_keys=True)


def read_prompts(sources: Sequence[str | Path], field: str = "prompt", raw: bool = False) -> list[Prompt]:
    """Every prompt of files and folders, in order, each once.

    A line of a `.txt` file is a prompt; a line of a `.jsonl` file is an object whose `field` is one, or a list of
    messages; `"raw": true` or false in it overrules `raw`. Both may end in `.gz`. Raises ConfigError that names the
    file and the line at fault.
    """
    found: dict[str, Prompt] = {}
    for source in sources:
        for path in _files(Path(source)):
            for prompt in _of_file(path, field, raw):
                found.setdefault(prompt.key, prompt)
    if not found:
        raise ConfigError(f"no prompts in {', '.join(map(str, sources))}; give files of one prompt a line")
    return list(found.values())


def _files(path: Path) -> Iterable[Path]:
    if path.is_file():
        if _kind(path) is None:
            raise ConfigError(f"{path}: prompts are read from {' and '.join(SUFFIXES)} files, which may end in .gz")
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such file or folder")
    return sorted(each for each in path.rglob("*") if each.is_file() and _kind(each) is not None)


def _kind(path: Path) -> str | None:
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    return suffix if suffix in SUFFIXES else None


def _of_file(path: Path, field: str, raw: bool) -> Iterator[Prompt]:
    is_json = _kind(path) == ".jsonl"
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                yield _of_json(line, field, raw, where) if is_json else Prompt(line.strip(), raw)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _of_json(line: str, field: str, raw: bool, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON ({error})") from None
    if not isinstance(value, dict) or field not in value:
        raise ConfigError(f"{where}: has no field {field!r}; name another with --field")
    content, raw = value[field], value.get("raw", raw)
    if not isinstance(raw, bool):
        raise ConfigError(f"{where}: raw must be true or false, not {raw!r}")
    if isinstance(content, str) and content:
        return Prompt(content, raw)
    if isinstance(content, list) and content and all(isinstance(each, dict) and "content" in each for each in content):
        return Prompt(content)
    raise ConfigError(f"{where}: {field!r} must be a text or a list of messages")
