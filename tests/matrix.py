"""Every pair of features, tried together: what the matrix in docs/matrix.md is generated from.

A feature is a way to decode (sampling options), a way to run (engine options), or a kind of model. A pair holds when
its result is, token for token, what the decoding gives alone on an engine with nothing special; it may also be refused,
with a reason. Sampled texts under residual verification are others of the same distribution, which is tested in
tests/spec; here they must be whole. `python tests/matrix.py` writes the document; `tests/engine/test_matrix.py` runs
the same and compares.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from headrace import LLM, SamplingParams
from headrace.frontend.output import RequestOutput
from tiny import write_tiny_llama

DOCUMENT = Path(__file__).parent.parent / "docs" / "matrix.md"
PROMPTS = [list(range(60, 60 + n)) + [65, 66] * (n // 4) for n in (5, 16, 24)]
BASE: dict[str, Any] = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}

DECODING: dict[str, dict[str, Any]] = {
    "seeded sampling": {"temperature": 0.9, "seed": 5},
    "top-k, top-p, min-p": {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 6},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "logit bias": {"logit_bias": {70: 4.0, 80: -100.0}},
    "allowed tokens": {"allowed_token_ids": tuple(range(50, 130))},
    "bad words": {"bad_words": ("A", "o", "th")},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": tuple(range(60, 90))},
    "stop tokens": {"stop_token_ids": tuple(range(0, 250, 3))},
    "stop strings": {"stop": ("a", "Qu", "\u0120")},
    "n choices": {"n": 3, "seed": 7},
    "best_of": {"best_of": 3, "seed": 8},
    "beam search": {"beam_width": 3, "n": 2},
    "logprobs": {"logprobs": 2},
    "prompt logprobs": {"prompt_logprobs": 2},
}
RUNNING: dict[str, dict[str, Any]] = {
    "chunked prefill": {"max_num_batched_tokens": 7, "max_num_seqs": 6},
    "small blocks": {"block_size": 2},
    "memory pressure": {"kv_cache": 39 * 4 * 192, "block_size": 4, "max_num_seqs": 6},
    "steps in flight": {"steps_in_flight": 3},
    "no prefix cache": {"prefix_caching": False},
    "priorities": {"scheduling": "priority"},
    "latency objectives": {"itl_slo": 0.001, "ttft_slo": 0.5},
    "speculation": {"speculate": "ngram", "num_draft_tokens": 4},
    "suffix decoding": {"speculate": "suffix", "num_draft_tokens": 4},
    "multi-token prediction": {"speculate": "mtp", "num_draft_tokens": 4},
    "draft model": {"speculate": "draft", "num_draft_tokens": 4, "draft_model": "itself"},
    "automatic speculation": {"speculate": "auto"},
    "token trees": {"speculate": "auto", "num_draft_tokens": 4, "draft_tree": 12},
    "residual verification": {"speculate": "auto", "num_draft_tokens": 4, "verify": "residual"},
    "residual trees": {"speculate": "auto", "num_draft_tokens": 4, "draft_tree": 12, "verify": "residual"},
}
MODELS: dict[str, dict[str, Any]] = {"sliding window": {"window": 9}}
ARITHMETIC: dict[str, dict[str, Any]] = {"int8 KV cache": {"kv_dtype": "int8"}}  # the same alone and together
ALWAYS = {"max_model_len": 90}

Result = list[list[tuple]]


def _result(outputs: list[RequestOutput]) -> Result:
    """Everything that a pair must not change."""

    def logprobs(entries: Any) -> Any:
        return None if entries is None else [entry and sorted(entry.items()) for entry in entries]

    return [
        [(o.prompt_logprobs and logprobs(o.prompt_logprobs), c.token_ids, c.text, c.finish_reason, logprobs(c.logprobs))
         for c in o.outputs]
        for o in outputs
    ]  # fmt: skip


def _form(result: Result) -> list[list[tuple]]:
    """What sampling leaves of a result: how many tokens, and how each choice ended."""
    return [[(len(tokens), reason) for _, tokens, _, reason, _ in choices] for choices in result]


class Matrix:
    """Runs pairs on one tiny model, or its windowed twin."""

    def __init__(self, folder: Path):
        self._paths = {window: write_tiny_llama(folder / str(window), window=window, mtp=True) for window in (None, 9)}
        self._plain: dict[tuple, LLM] = {}

    @contextmanager
    def engine(self, window: int | None, **options: Any) -> Iterator[LLM]:
        if options.get("draft_model"):
            options["draft_model"] = str(self._paths[None])  # for the windowed twin it is wrong every so often
        with LLM(str(self._paths[window]), **{**ALWAYS, **options}) as llm:
            yield llm

    def alone(self, window: int | None, params: SamplingParams, arithmetic: dict[str, Any]) -> Result:
        """Each prompt by itself on an engine that caches nothing and has room for everything."""
        key = (window, *arithmetic.items())
        if key not in self._plain:
            self._plain[key] = LLM(str(self._paths[window]), prefix_caching=False, **ALWAYS, **arithmetic)
        return [_result(self._plain[key].generate([prompt], params))[0] for prompt in PROMPTS]

    def pair(self, one: str, other: str) -> str:
        """holds, drawn anew, refused: why, or FAILS."""
        decoding: dict[str, Any] = {}
        running: dict[str, Any] = {}
        arithmetic: dict[str, Any] = {}
        window = None
        for name in (one, other):
            decoding |= DECODING.get(name, {})
            running |= RUNNING.get(name, {})
            arithmetic |= ARITHMETIC.get(name, {})
            window = MODELS.get(name, {}).get("window", window)
        try:
            params = SamplingParams(**{**BASE, **decoding})
        except ValueError as error:
            return f"refused: {error}"
        expected = self.alone(window, params, arithmetic)
        with self.engine(window, **running, **arithmetic) as llm:
            # twice: the second time prompts and answers are known to the prefix cache
            found = [_result(llm.generate(PROMPTS, params)) for _ in range(2)]
            llm.engine.core.scheduler.check()
        if running.get("verify") == "residual" and params.temperature > 0:
            whole = all(_form(result) == _form(expected) for result in found)
            return "drawn anew" if whole else "FAILS"
        return "holds" if found == [expected, expected] else "FAILS"

    def close(self) -> None:
        for llm in self._plain.values():
            llm.close()


def run(show: Callable[[str], None] = lambda text: None) -> dict[tuple[str, str], str]:
    """Every pair's outcome."""
    names = [*DECODING, *RUNNING, *MODELS, *ARITHMETIC]
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder))
        outcomes = {}
        for one, other in itertools.combinations_with_replacement(names, 2):
            if one == other and one not in DECODING:
                continue
            outcomes[one, other] = matrix.pair(one, other)
            show(f"{one} + {other}: {outcomes[one, other]}")
        matrix.close()
    return outcomes


def document(outcomes: dict[tuple[str, str], str]) -> str:
    """The matrix in Markdown."""
    names = [*DECODING, *RUNNING, *MODELS, *ARITHMETIC]
    reasons: list[str] = []
    lines = [
        "# Features together",
        "",
        "Generated by `python tests/matrix.py`, checked by every test run. ● the tokens, text, finish reasons and",
        "logprobs of three prompts run together, twice, are those that each gives alone on an engine with nothing",
        "special; ○ sampled texts under residual verification, which are others of the same distribution (tested in",
        "`tests/spec`), are whole; a number: refused at the door, for the reason below. Nothing is silently ignored.",
        "",
        "| | " + " | ".join(str(i) for i in range(1, len(names) + 1)) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for row, one in enumerate(names):
        cells = []
        for column, other in enumerate(names):
            outcome = outcomes.get((one, other) if row <= column else (other, one), "")
            if outcome.startswith("refused: "):
                reason = outcome.removeprefix("refused: ")
                if reason not in reasons:
                    reasons.append(reason)
                outcome = str(reasons.index(reason) + 1)
            cells.append({"holds": "●", "drawn anew": "○", "FAILS": "✗"}.get(outcome, outcome))
        lines.append(f"| {row + 1} {one} | " + " | ".join(cells) + " |")
    lines += ["", "Reasons:", ""] + [f"{index}. {reason}" for index, reason in enumerate(reasons, start=1)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document(run(print)), encoding="utf-8")
