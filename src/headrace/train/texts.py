"""Texts that the model writes: made by the engine, kept as shards in a folder, from where generation goes on.

    job j    prompt j mod P, at a temperature that changes from round to round; seed j
    shard    texts-N.npz: token ids of its texts one behind the other, their lengths, their prompts' lengths, their jobs

A shard is whole or not there. What runs when time is up is cut and kept: a beginning of a text is a text.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.config import ConfigError
from headrace.frontend.chat import ChatTemplateError
from headrace.frontend.engine import Engine
from headrace.frontend.output import RequestOutput
from headrace.loading.errors import CheckpointError
from headrace.loading.json_file import read_json
from headrace.sampling.params import SamplingParams
from headrace.train.prompts import Prompt

_SHARD = 1024  # texts
_LEAST = 8  # tokens that the model must have written


@dataclass(frozen=True)
class Text:
    """A prompt and what the model wrote behind it."""

    tokens: np.ndarray  # int32 [N]
    prompt_len: int
    job: int


class TextFolder:
    """Shards of texts. `facts` (of model, prompts and options) must be those that the folder was begun with."""

    def __init__(self, path: Path, facts: dict[str, object]):
        self.path = path
        stated = path / "texts.json"
        if stated.is_file():
            try:
                known = read_json(stated)
            except CheckpointError as error:
                raise ConfigError(f"{error}; delete {path}, or give another --work folder") from None
            if other := sorted(name for name in facts if known.get(name) != facts[name]):
                raise ConfigError(
                    f"{path} holds texts of another {other[0]} ({known.get(other[0])!r}, not {facts[other[0]]!r}); "
                    "give another --work folder, or delete this one"
                )
        else:
            path.mkdir(parents=True, exist_ok=True)
            stated.write_text(json.dumps(facts, indent=1), encoding="utf-8")
        self.texts = [text for shard in sorted(path.glob("texts-*.npz")) for text in _read(shard)]
        self._waiting: list[Text] = []

    @property
    def num_written(self) -> int:
        """Tokens that the model wrote."""
        return sum(len(text.tokens) - text.prompt_len for text in self.texts)

    def add(self, text: Text) -> None:
        """Keep a text; it is on disk after the next `flush` at the latest."""
        self.texts.append(text)
        self._waiting.append(text)
        if len(self._waiting) >= _SHARD:
            self.flush()

    def flush(self) -> None:
        """Write what waits as a shard."""
        if not self._waiting:
            return
        number = len(list(self.path.glob("texts-*.npz")))
        target = self.path / f"texts-{number:05}.npz"
        temporary = self.path / "unfinished.npz"
        np.savez(
            temporary,
            tokens=np.concatenate([text.tokens for text in self._waiting]),
            lengths=np.array([len(text.tokens) for text in self._waiting], np.int32),
            prompt_lens=np.array([text.prompt_len for text in self._waiting], np.int32),
            jobs=np.array([text.job for text in self._waiting], np.int64),
        )
        os.replace(temporary, target)
        self._waiting = []


def _read(path: Path) -> list[Text]:
    try:
        with np.load(path) as shard:
            ends = np.cumsum(shard["lengths"])
            parts = np.split(shard["tokens"], ends[:-1])
            return [
                Text(part, int(prompt_len), int(job))
                for part, prompt_len, job in zip(parts, shard["prompt_lens"], shard["jobs"], strict=True)
            ]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{path} is damaged ({error}); delete it") from None


@contextmanager
def alone_in(path: Path) -> Iterator[None]:
    """Make the folder of texts and state, and keep other processes from training in it meanwhile. ConfigError if one
    does already, or if the folder cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("a")
    except OSError as error:
        raise ConfigError(f"nothing can be written into {path}: {error.strerror}; give another folder") from None
    with lock:  # the system lets go of it when the process ends, in whatever way
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # a system without such locks
        except BlockingIOError:
            raise ConfigError(f"another process trains in {path}; wait for it, or give another --work folder") from None
        yield


def write_texts(
    engine: Engine,
    prompts: Sequence[Prompt],
    folder: TextFolder,
    *,
    num_tokens: int,
    max_tokens: int,
    temperatures: Sequence[float],
    minutes: float | None,
    tell: Callable[[int], None],
) -> None:
    """Let the engine write until the folder holds `num_tokens` tokens of its own, or for `minutes`. `tell` hears of
    the tokens so far. Prompts that are too long are left out; ConfigError if that leaves none."""
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    ids = _token_ids(engine, prompts, max_tokens)
    jobs = _jobs(len(prompts), temperatures, {text.job for text in folder.texts})
    jobs = (job for job in jobs if ids[job[1]] is not None)
    running: dict[int, RequestOutput] = {}
    most = 2 * engine.config.max_num_seqs
    written = folder.num_written
    try:
        while written < num_tokens and (deadline is None or time.monotonic() < deadline):
            for job, prompt, temperature in itertools.islice(jobs, most - len(running)):
                params = SamplingParams(temperature=temperature, seed=job, max_tokens=max_tokens)
                running[job] = engine.submit(ids[prompt] or [], params, live=False)
            if not running:
                break
            engine.step()
            for job in [job for job, output in running.items() if output.finished]:
                written += _keep(folder, job, running.pop(job))
            tell(written)
    finally:  # also after Ctrl-C: what is written is written
        for job, output in running.items():
            engine.abort(output)
            _keep(folder, job, output)
        folder.flush()


def _keep(folder: TextFolder, job: int, output: RequestOutput) -> int:
    """Tokens that were new in it."""
    written = output.outputs[0].token_ids
    if len(written) >= _LEAST:
        tokens = np.array([*output.prompt_token_ids, *written], np.int32)
        folder.add(Text(tokens, len(output.prompt_token_ids), job))
    return len(written)


def _jobs(num_prompts: int, temperatures: Sequence[float], done: set[int]) -> Iterator[tuple[int, int, float]]:
    """(job, prompt, temperature) of what is still to be written; greedy texts once a prompt."""
    sampled = [each for each in temperatures if each > 0]
    for job in itertools.count():
        turn, prompt = divmod(job, num_prompts)
        if turn >= len(temperatures) and not sampled:
            return
        if turn < len(temperatures):
            temperature = temperatures[(turn + prompt) % len(temperatures)]
        else:
            temperature = sampled[(turn + prompt) % len(sampled)]
        if job not in done:
            yield job, prompt, temperature


def _token_ids(engine: Engine, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int] | None]:
    """Of every prompt; None if there is no room behind it."""
    room = engine.config.max_model_len - max_tokens
    found: list[list[int] | None] = []
    for prompt in prompts:
        ids = prompt_ids(engine, prompt)
        found.append(ids if 0 < len(ids) <= room else None)
    if all(ids is None for ids in found):
        raise ConfigError(f"every prompt is longer than {room} tokens; raise --max-model-len or lower --max-tokens")
    return found


def prompt_ids(engine: Engine, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, as chat where it is one and the model has a template."""
    content = prompt.content
    if isinstance(content, str) and (prompt.raw or engine.chat_template.source is None):
        return engine.tokenizer.encode(content)
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    try:
        return engine.render(messages)
    except ChatTemplateError as error:
        raise ConfigError(f"the chat template refuses a prompt: {error}") from None
