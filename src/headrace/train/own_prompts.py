"""Prompts that the model writes itself: given its chat template up to where a user's words begin, it goes on as a user
(Magpie: Xu et al. 2024). What it has been asked in its training comes out, more varied than forms filled in by hand.

Prompt n is drawn with seed n. They lie in own-prompts.jsonl, from where writing goes on; numbers that gave none (the
model did not end its turn) stand there too, so that they are not tried again.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

from headrace.config import ConfigError
from headrace.frontend.chat import ChatTemplateError
from headrace.frontend.engine import Engine
from headrace.frontend.output import RequestOutput
from headrace.sampling.params import SamplingParams
from headrace.train.prompts import Prompt

_TEMPERATURE = 0.9  # at 1 small models end fewer of their turns, and more of what they write is noise
_MOST = 192  # tokens; a longer turn is seldom a question
_FLUSH = 1024  # prompts
_MARK = "WHAT-THE-USER-SAYS"


class OwnPrompts:
    """The numbers 0 to `count` - 1 and what the model wrote for them; `facts` are of the model."""

    def __init__(self, folder: Path, count: int, facts: dict[str, object]):
        self._path, self._facts, self._count = folder / "own-prompts.jsonl", facts, count
        self._found: dict[int, str | None] = {}
        if count and self._path.is_file():
            self._read()

    @property
    def missing(self) -> list[int]:
        """Numbers that were not tried yet."""
        return [number for number in range(self._count) if number not in self._found]

    @property
    def prompts(self) -> list[Prompt]:
        """Those that came out, each once, in the order of their numbers."""
        texts = (self._found.get(number) for number in range(self._count))
        return [Prompt(text) for text in dict.fromkeys(texts) if text]

    def add(self, number: int, text: str | None) -> None:
        """Note what came of a number; None: nothing."""
        self._found[number] = text
        if len(self._found) % _FLUSH == 0:
            self.flush()

    def flush(self) -> None:
        """Write all of them; the file is whole or as it was."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = [self._facts, *({"number": number, "prompt": text} for number, text in sorted(self._found.items()))]
        unfinished = self._path.with_name("unfinished")
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        os.replace(unfinished, self._path)

    def _read(self) -> None:
        try:
            facts, *lines = [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]
            self._found = {int(line["number"]): line["prompt"] for line in lines}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._path} is damaged ({error}); delete it") from None
        if facts != self._facts:
            raise ConfigError(f"{self._path} is of another model; give another --work folder, or delete this file")


def write_prompts(engine: Engine, own: OwnPrompts, tell: Callable[[int, int], None]) -> None:
    """Let the engine write the prompts that are missing. `tell` hears how many of how many are done. ConfigError for a
    model whose chat template does not say where a user's words stand."""
    prefix, params = _users_turn(engine)
    missing = own.missing
    waiting = iter(missing)
    running: dict[int, RequestOutput] = {}
    most, done = 2 * engine.config.max_num_seqs, 0
    try:
        while done < len(missing):
            for number in itertools.islice(waiting, most - len(running)):
                running[number] = engine.submit(prefix, params.with_(seed=number), live=False)
            engine.step()
            for number in [number for number, output in running.items() if output.finished]:
                written = running.pop(number).outputs[0]
                own.add(number, written.text.strip() or None if written.finish_reason == "stop" else None)
                done += 1
            tell(done, len(missing))
    finally:  # half a prompt is none: what was running is tried again
        for output in running.values():
            engine.abort(output)
        own.flush()


def _users_turn(engine: Engine) -> tuple[list[int], SamplingParams]:
    """Token ids of the template up to a user's first words, and how to draw them up to the end of the turn."""
    if engine.chat_template.source is None:
        raise ConfigError("the model has no chat template, so it cannot write prompts; leave out --own-prompts")
    try:
        text = engine.chat_template.render([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    except ChatTemplateError as error:
        raise ConfigError(f"the chat template refuses a user's turn ({error}); leave out --own-prompts") from None
    before, mark, after = text.partition(_MARK)
    prefix = engine.tokenizer.encode(before, add_special=False)
    if not mark or not prefix:
        raise ConfigError("the chat template does not say where a user's turn begins; leave out --own-prompts")
    if len(prefix) + _MOST > engine.config.max_model_len:
        raise ConfigError(f"own prompts take {len(prefix) + _MOST} tokens; raise --max-model-len")
    params = SamplingParams(temperature=_TEMPERATURE, max_tokens=_MOST)
    end = engine.tokenizer.encode(after, add_special=False)
    if end and not engine.tokenizer.decode(end[:1]):  # a special token, of which text shows nothing
        return prefix, params.with_(stop_token_ids=(end[0],))
    return prefix, params.with_(stop=(after.strip(),)) if after.strip() else params
