"""From what the user said, the model and the machine to the final configuration, with the reason of every choice.

Pure: the same arguments give the same answer, and nothing is measured or changed here.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config import ConfigError, EngineArgs, EngineConfig, parse_bytes
from headrace.core.kv_layout import KVGroup, KVLayout
from headrace.device.cpu import CpuFacts
from headrace.models.spec import ModelSpec

_DEFAULT_SEQS = 64
_DEFAULT_BUDGET = 256
_PACED_BUDGET = 1024  # where the cost model chooses the size of chunks
_DEFAULT_LEN = 8192
_DEFAULT_BLOCK = 16
_KV_SHARE = 0.3
_MOST_DRAFTS = 8


@dataclass(frozen=True)
class Choice:
    """One resolved option and why it has its value."""

    option: str
    value: str
    reason: str


def kv_groups(spec: ModelSpec) -> tuple[KVGroup, ...]:
    """Layers that see the same positions, in groups of (nearly) one size.

    Every block spans as many memory tensors as the largest group has layers, so a smaller group leaves memory unused:
    15 window layers and 3 full ones make 5 groups and 1 of three layers, not a group of 15 and one of 3. Where the
    numbers do not divide, the size is the one that costs least: slots of layers, used or not, and half a slot per
    group for its block table and its metadata in every step.
    """
    layers_of: dict[int | None, list[int]] = {}
    for layer in range(spec.num_layers):
        layers_of.setdefault(spec.window(layer), []).append(layer)
    counts = [len(layers) for layers in layers_of.values()]

    def cost(size: int) -> float:
        return sum(-(-count // size) for count in counts) * (size + 0.5)

    size = min(range(1, max(counts) + 1), key=cost)
    return tuple(
        KVGroup(tuple(layers[first : first + size]), spec.num_kv_heads, spec.head_dim, window)
        for window, layers in layers_of.items()
        for first in range(0, len(layers), size)
    )


def _human(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def resolve(args: EngineArgs, spec: ModelSpec, facts: CpuFacts) -> tuple[EngineConfig, KVLayout, list[Choice]]:
    """The configuration, the cut of the KV cache, and why; ConfigError if the wishes cannot be met together."""
    choices: list[Choice] = []

    def choose(name: str, said: int | None, default: int, reason: str) -> int:
        value = default if said is None else said
        choices.append(Choice(name, str(value), reason if said is None else "as asked"))
        return value

    mode = "default" if args.mode == "auto" else args.mode
    reason = "inputs of quantised weights as 16-bit integers: faster than fp32 as soon as requests share a step"
    choices.append(Choice("mode", mode, reason if args.mode == "auto" else "as asked"))
    if args.max_model_len is not None and args.max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len {args.max_model_len} is beyond the {spec.max_position} positions the model was made for"
        )
    max_len = choose(
        "max_model_len",
        args.max_model_len,
        min(spec.max_position, _DEFAULT_LEN),
        f"the model's {spec.max_position} positions, at most {_DEFAULT_LEN} unless asked",
    )
    seqs = choose("max_num_seqs", args.max_num_seqs, _DEFAULT_SEQS, "more rows gain little on a CPU")
    budget = choose(
        "max_num_batched_tokens",
        args.max_num_batched_tokens,
        max(_DEFAULT_BUDGET if args.itl_slo is None else _PACED_BUDGET, seqs),
        "a chunk of prompt this long delays running requests by well under a second"
        if args.itl_slo is None
        else f"chunks are as long as itl_slo {args.itl_slo:g} ms allows, and at most this",
    )
    if budget < seqs:
        raise ConfigError(f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({seqs})")
    block = choose("block_size", args.block_size, _DEFAULT_BLOCK, "small blocks waste little memory")
    groups = kv_groups(spec)
    one = KVLayout(groups, block, 1, max_span=budget)
    per_sequence = one.blocks_for(max_len)
    if args.kv_cache is not None:
        size = parse_bytes(args.kv_cache, facts.available_memory, "kv_cache")
        reason = "as asked"
    else:
        most = seqs * per_sequence * one.block_bytes
        size = min(most, int(facts.available_memory * _KV_SHARE))
        reason = (
            f"room for {seqs} sequences of {max_len} tokens"
            if size == most
            else f"{_KV_SHARE:.0%} of the {_human(facts.available_memory)} that are free"
        )
    num_blocks = size // one.block_bytes
    if num_blocks < len(groups) * 2:
        raise ConfigError(
            f"kv_cache {_human(size)} holds {num_blocks} blocks of {block} tokens ({_human(one.block_bytes)} each); "
            f"at least {len(groups) * 2} are needed"
        )
    layout = KVLayout(groups, block, num_blocks, max_span=budget)
    choices.append(Choice("kv_cache", f"{_human(size)}, {num_blocks} blocks of {block} tokens", reason))
    if layout.num_tokens < max_len:
        if args.max_model_len is not None and args.kv_cache is not None:
            raise ConfigError(
                f"kv_cache {_human(size)} holds {layout.num_tokens} tokens, fewer than max_model_len {max_len}; "
                f"give it at least {_human(per_sequence * one.block_bytes)} or lower max_model_len"
            )
        max_len = layout.num_tokens
        choices.append(Choice("max_model_len", str(max_len), "what the KV cache holds"))
    asked = args.num_threads
    if asked is not None and asked > facts.num_threads:
        threads = facts.num_threads
        reason = f"{asked} were asked for, but this process may use {threads} processors; more threads would only wait"
        choices.append(Choice("num_threads", str(threads), reason))
    else:
        threads = choose("num_threads", asked, facts.num_threads, "the processors this process may use")
    depth = choose("steps_in_flight", args.steps_in_flight, 1, "a CPU has nothing to overlap with")
    choices.append(
        Choice("prefix_caching", str(args.prefix_caching), "finding a prefix costs less than computing it")
        if args.prefix_caching
        else Choice("prefix_caching", "False", "as asked")
    )
    if args.speculate != "off":
        depth_reason = "as asked" if args.num_draft_tokens else "each step verifies what the cost model finds to pay"
        choices.append(Choice("num_draft_tokens", str(args.num_draft_tokens or f"up to {_MOST_DRAFTS}"), depth_reason))
    config = EngineConfig(
        mode=mode,
        max_model_len=max_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        kv_cache_bytes=size,
        block_size=block,
        num_blocks=num_blocks,
        prefix_caching=args.prefix_caching,
        scheduling=args.scheduling,
        speculate=args.speculate,
        max_draft_tokens=args.num_draft_tokens or _MOST_DRAFTS,
        fixed_depth=args.num_draft_tokens is not None,
        steps_in_flight=depth,
        ledger=args.ledger,
        num_threads=threads,
        ttft_slo=None if args.ttft_slo is None else args.ttft_slo / 1e3,
        itl_slo=None if args.itl_slo is None else args.itl_slo / 1e3,
    )
    return config, layout, choices
