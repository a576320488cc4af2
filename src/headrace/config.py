"""What a user can say (`EngineArgs`) and what the engine runs with (`EngineConfig`). Both are frozen.

The command line and the keywords of `LLM` are generated from `EngineArgs`: one field, one help text.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}

DTYPES = ("bfloat16", "float16", "float32")
NETWORKS = ("draft", "eagle", "medusa", "mlp", "mtp")  # what draft_model can be, or, of mtp, a part of the model
PROPOSERS = ("suffix", "ngram", *NETWORKS)  # in the order in which they are asked
MOST_DRAFTS = 64  # at a time
SPECULATE = ("off", "auto", *PROPOSERS, "synthetic")

_MOST = 2**31 - 1
_MOST_BYTES = 2**60
_MOST_SLO = 1e9  # milliseconds
_RANGES = {
    "max_model_len": (2, _MOST),
    "max_num_seqs": (1, _MOST),
    "max_num_batched_tokens": (1, _MOST),
    "block_size": (1, _MOST),
    "num_threads": (1, _MOST),
    "steps_in_flight": (1, 3),
    "num_draft_tokens": (1, MOST_DRAFTS),
    "draft_tree": (0, MOST_DRAFTS),
    "suffix_tokens": (0, 2**28),
}


class ConfigError(ValueError):
    """An option that cannot be; the message says what would do."""


def option(default: Any, text: str, **extra: Any) -> Any:
    """A dataclass field with its help text."""
    return field(default=default, metadata={"help": text, **extra})


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Options of an engine; None lets the engine choose (and say why)."""

    model: str | None = option(None, "model name, GGUF file, folder or hub id; none: smollm2-135m")
    mode: Literal["auto", "default", "exact", "fast", "int8"] = option(
        "auto",
        "arithmetic: exact (fp32), default (quantised weights times rounded inputs), fast (where the processor has AMX "
        "it depends on how many tokens share a step: answers are the same up to near-ties only), int8 (inputs rounded "
        "to 8 bits: faster, a little less exact) or auto (default)",
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where the model computes; auto: a GPU if one can be used")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto", "numbers of weights and activations on a GPU; auto: bfloat16, or float32 in exact mode"
    )
    gpu_memory: str | int = option("90%", "GPU memory to use in all: bytes, 60GiB, or a share of what the GPU has")
    cuda_graphs: bool = option(True, "on a GPU, run decode steps as CUDA graphs")
    step_kernel: Literal["auto", "on", "off"] = option(
        "auto",
        "on a Hopper GPU with nvcc, decode a few rows by one kernel for the whole step: on (where it can), auto (where "
        "it was measured to be faster) or off",
    )
    invariant: bool = option(
        False, "on a GPU, a request's logits do not depend, bit for bit, on the requests beside it (on a CPU: always)"
    )
    max_model_len: int | None = option(None, "longest prompt and output together, in tokens")
    max_num_seqs: int | None = option(None, "most requests running at once")
    max_num_batched_tokens: int | None = option(None, "most tokens in one step; longer prompts are cut into chunks")
    kv_cache: str | int | None = option(None, "size of the KV cache: bytes, 512MiB, 2GB, or 30% of free memory")
    quantize: Literal["none", "q8", "q4"] = option(
        "none", "quantise float weights while they are loaded: q8 (8 bits) or q4 (4 bits)"
    )
    quantize_group: int = option(32, "weights that share a scale with quantize: 32, or 64 (smaller, and coarser)")
    block_size: int | None = option(None, "tokens in a block of KV cache")
    kv_dtype: Literal["auto", "fp32", "bf16", "int8"] = option(
        "auto", "numbers of the KV cache: fp32, bf16 (half the memory), int8 with a scale a vector (a quarter)"
    )
    prefix_caching: bool = option(True, "find prompts, or their beginnings, that are computed already")
    scheduling: Literal["fcfs", "priority"] = option("fcfs", "order in which waiting requests are admitted")
    num_threads: int | None = option(None, "processor threads of the native kernels; none: all this process may use")
    attention_backend: str | None = option(None, "attention kernels to use instead of the selector's choice")
    speculate: Literal["off", "auto", "suffix", "ngram", "draft", "eagle", "medusa", "mlp", "mtp", "synthetic"] = (
        option(
            "off",
            "draft tokens and verify them together: ngram and suffix look the text up (suffix also in past outputs); "
            "draft, eagle, medusa and mlp ask draft_model, mtp a part of the model; auto takes for each request what "
            "pays most; synthetic: benchmarks",
        )
    )
    verify: Literal["same", "residual"] = option(
        "same",
        "which drafts are accepted: same text as without speculation, or residual rejection sampling (the same "
        "distribution, not the same text; drafts of a network are accepted a little more often)",
    )
    synthetic_acceptance: float | None = option(
        None, "with speculate=synthetic: accept drafts at this rate, whatever they are; the text is meaningless"
    )
    draft_model: str | None = option(
        None,
        "a smaller model with the same tokens, as for model, or the folder of draft heads (EAGLE, Medusa, MLP); "
        "none, with eagle or auto: the head that comes with Headrace for the model",
    )
    num_draft_tokens: int | None = option(None, "verify always so many drafts; none: as many as the cost model advises")
    draft_tree: int = option(
        0, "most drafts at a time as a tree of alternatives, up to num_draft_tokens deep; 0: a chain"
    )
    suffix_tokens: int | None = option(None, "tokens of past outputs that suffix searches; 0: none")
    steps_in_flight: int | None = option(None, "steps started before the first one's result is read (1 to 3)")
    ttft_slo: float | None = option(
        None, "milliseconds within which first tokens should come; a prompt that would be late gets larger chunks"
    )
    itl_slo: float | None = option(
        None, "milliseconds that a running request should wait for its next token; bounds chunks and admissions"
    )
    ledger: bool = option(True, "record each step: what it did, what bound it, what was refused")

    @classmethod
    def make(cls, **options: Any) -> EngineArgs:
        """From keywords; an unknown one raises TypeError and names the nearest known one."""
        known = [each.name for each in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; options are {', '.join(known)}"
                raise TypeError(f"unknown option {name!r}{hint}")
        return cls(**options)

    def __post_init__(self) -> None:
        for name in ("model", "draft_model"):
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        for name in ("model", "draft_model", "attention_backend"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name} must be a string that is not empty, not {_shown(value)}")
        for name in ("prefix_caching", "ledger", "cuda_graphs", "invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {_shown(getattr(self, name))}")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is None or (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
                continue
            above = isinstance(value, int) and value > high
            span = f"from {low} to {high}" if above or high < _MOST else f"of at least {low}"
            raise ConfigError(f"{name} must be an integer {span}, not {_shown(value)}")
        for name in ("ttft_slo", "itl_slo"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value <= _MOST_SLO):
                raise ConfigError(f"{name} must be milliseconds above 0, at most {_MOST_SLO:g}, not {_shown(value)}")
            if value is not None and not self.ledger:
                raise ConfigError(f"{name} needs the cost model that the ledger teaches; leave out ledger=False")
        if self.kv_cache is not None:
            # what is wrong with it is said before a model is loaded
            parse_bytes(self.kv_cache, _MOST_BYTES, "kv_cache")
        parse_bytes(self.gpu_memory, _MOST_BYTES, "gpu_memory")
        if self.quantize_group not in (32, 64) or isinstance(self.quantize_group, bool):
            raise ConfigError(f"quantize_group must be 32 or 64, not {_shown(self.quantize_group)}")
        if self.quantize_group != 32 and self.quantize == "none":
            raise ConfigError("quantize_group is of weights that quantize makes; give quantize=q8 or q4 too")
        if self.num_draft_tokens is not None and self.speculate == "off":
            raise ConfigError("num_draft_tokens needs a way to draft; give speculate=auto too")
        if self.draft_tree and self.speculate in ("off", "synthetic"):
            raise ConfigError("draft_tree is of drafts; give speculate=auto, or another way to draft, too")
        rate = self.synthetic_acceptance
        if (self.speculate == "synthetic") != (rate is not None):
            raise ConfigError("speculate=synthetic and synthetic_acceptance (0 to 1) are given together or not at all")
        if rate is not None and not (isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 <= rate <= 1):
            raise ConfigError(f"synthetic_acceptance must be a number from 0 to 1, not {_shown(rate)}")
        if self.verify == "residual" and self.speculate in ("off", "synthetic"):
            raise ConfigError("verify=residual judges drafts; give speculate=auto, draft, suffix or ngram too")
        if self.speculate == "mtp" and self.draft_model is not None:
            raise ConfigError("speculate=mtp drafts with a part of the model itself; leave out draft_model")
        if self.speculate in ("draft", "medusa", "mlp") and self.draft_model is None:
            raise ConfigError(f"speculate={self.speculate} needs draft_model: a smaller model, or the folder of heads")
        if self.draft_model is not None and self.speculate not in ("auto", *NETWORKS):
            raise ConfigError(f"draft_model drafts with speculate={', '.join(NETWORKS)} or auto; give one of them too")
        if self.suffix_tokens is not None and self.speculate not in ("auto", "suffix"):
            raise ConfigError("suffix_tokens is for suffix decoding; give speculate=suffix or auto too")
        for name, allowed in (
            ("mode", ("auto", "default", "exact", "fast", "int8")),
            ("device", ("auto", "cpu", "cuda")),
            ("dtype", ("auto", *DTYPES)),
            ("scheduling", ("fcfs", "priority")),
            ("kv_dtype", ("auto", "fp32", "bf16", "int8")),
            ("quantize", ("none", "q8", "q4")),
            ("step_kernel", ("auto", "on", "off")),
            ("speculate", SPECULATE),
            ("verify", ("same", "residual")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {_shown(getattr(self, name))}")


@dataclass(frozen=True)
class EngineConfig:
    """Resolved numbers; made by `resolve` and never changed."""

    mode: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int  # upper bound; memory is touched as it is used
    block_size: int
    num_blocks: int
    prefix_caching: bool
    scheduling: str
    proposers: tuple[str, ...]  # of drafts, in the order in which they are asked; none: no speculation
    max_draft_tokens: int
    fixed_depth: bool  # verify all drafts; else as many as the cost model finds to pay
    steps_in_flight: int
    ledger: bool
    num_threads: int
    device: str = "cpu"
    dtype: str = "float32"
    quantize: str = "none"
    quantize_group: int = 32
    suffix_tokens: int = 0
    draft_tree: int = 0
    verify: str = "same"
    synthetic_acceptance: float | None = None
    graphs: bool = False
    step_kernel: str = "off"
    invariant: bool = False
    ttft_slo: float | None = None  # seconds
    itl_slo: float | None = None  # seconds

    @property
    def label(self) -> str:
        """How results are labelled that were taken with it."""
        if self.synthetic_acceptance is None:
            return self.mode
        return f"{self.mode} SYNTHETIC acceptance {self.synthetic_acceptance:g}, no real text"


def parse_bytes(text: str | int, whole: int, name: str) -> int:
    """Bytes of '512MiB', '2GB', '1073741824' or '30%' (of `whole`); ConfigError names the option."""
    example = f"{name} takes bytes such as 512MiB, 2GB or 30%"
    if isinstance(text, int) and not isinstance(text, bool):
        if text > _MOST_BYTES:
            raise ConfigError(f"{example}; {_shown(text)} is more than any machine has")
        number, unit = float(text), ""
    else:
        match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*(%|[kmg]?i?b?)\s*", str(text).lower())
        if not isinstance(text, str) or match is None or match[2].removesuffix("b") == "i":
            raise ConfigError(f"{example}, not {_shown(text)}")
        number, unit = float(match[1]), match[2]
    if unit == "%" and number > 100:
        raise ConfigError(f"{example}; {_shown(text)} is more than there is")
    value = number / 100 * whole if unit == "%" else number * _UNITS[unit.removesuffix("b")]
    if value > _MOST_BYTES:
        raise ConfigError(f"{example}; {_shown(text)} is more than any machine has")
    if value < 1:
        raise ConfigError(f"{name} must be above zero, not {_shown(text)}")
    return int(value)


def _shown(value: Any) -> str:
    """A value as a message shows it, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
