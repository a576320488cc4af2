"""From what the user said, the model and the machine to the final configuration, with the reason of every choice.

Pure: the same arguments give the same answer, and nothing is measured or changed here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.config import NETWORKS, PROPOSERS, ConfigError, EngineArgs, EngineConfig, parse_bytes
from headrace.core.kv_layout import KVGroup, KVLayout
from headrace.device.cpu import CpuFacts
from headrace.device.cuda import GpuFacts
from headrace.models.spec import ModelSpec
from headrace.ops.kv_format import KV_FORMATS

_PACED_BUDGET = 1024  # where the cost model chooses the size of chunks
_DEFAULT_LEN = 8192
_DEFAULT_BLOCK = 16
_KV_SHARE = 0.3
_KV_NAMES = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}
_MOST_DRAFTS = 16
_MOST_TREE = 63  # nodes of a tree on a GPU: masks of ancestors have a bit for each, and one for the token before
_SUFFIX_TOKENS = 1 << 18  # 5 MiB
_GRAPH_BYTES = 1 << 30  # of GPU memory, kept for graphs and the library's workspaces


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


@dataclass(frozen=True)
class _Device:
    """What a kind of device makes of options that nobody gave, and why."""

    seqs: int
    seqs_reason: str
    budget: int
    budget_reason: str
    depth: int
    depth_reason: str
    kv_memory: int  # bytes that the KV cache may take if nobody says how many
    kv_reason: str
    kv_format: str = "float32"
    kv_format_reason: str = ""
    kv_fills: bool = False  # take all of kv_memory, whatever max_num_seqs needs at most


def _cpu(args: EngineArgs, facts: CpuFacts) -> _Device:
    return _Device(
        seqs=64,
        seqs_reason="more rows gain little on a CPU",
        budget=256,
        budget_reason="a chunk of prompt this long delays running requests by well under a second",
        depth=1,
        depth_reason="a CPU has nothing to overlap with",
        kv_memory=int(facts.available_memory * _KV_SHARE),
        kv_reason=f"{_KV_SHARE:.0%} of the {_human(facts.available_memory)} that are free",
        kv_format=_KV_NAMES.get(args.kv_dtype) or ("float32" if args.mode == "exact" else "bfloat16"),
        kv_format_reason="keys and values as they were computed"
        if args.mode == "exact"
        else "half the memory and half the reading of fp32; exact mode keeps fp32",
    )


def _gpu(
    args: EngineArgs, spec: ModelSpec, gpu: GpuFacts, num_weights: int, dtype: str, draft: ModelSpec | None
) -> _Device:
    element = 4 if dtype == "float32" else 2
    weight_bytes = num_weights * element
    if args.kv_dtype != "auto" and _KV_NAMES[args.kv_dtype] != dtype:
        raise ConfigError(f"on a GPU the KV cache has the dtype, {dtype}, not {args.kv_dtype}; leave kv_dtype out")
    limit = parse_bytes(args.gpu_memory, gpu.total_memory, "gpu_memory")
    budget, seqs = args.max_num_batched_tokens or 8192, args.max_num_seqs or 256
    inner = max(2 * spec.intermediate_size, spec.q_size + 2 * spec.kv_size)
    drafts = 0 if args.speculate == "off" else args.draft_tree or args.num_draft_tokens or _MOST_DRAFTS
    lines = min(budget, seqs * (1 + drafts))  # of logits
    activations = budget * (inner + 8 * spec.hidden_size) * element * 2 + 3 * lines * spec.vocab_size * 4
    others = gpu.total_memory - gpu.free_memory
    memory = limit - others - weight_bytes - activations - _GRAPH_BYTES
    plan = (
        f"{_human(limit)} of {gpu.name}'s {_human(gpu.total_memory)}, less {_human(others)} that others use, "
        f"{_human(weight_bytes)} of weights, {_human(activations)} of activations, {_human(_GRAPH_BYTES)} for graphs"
    )
    if draft is not None:  # as many tokens in a cache of its own
        memory = memory * _kv_size(spec) // (_kv_size(spec) + _kv_size(draft))
        plan += ", and the draft model's cache"
    if memory <= 0 and args.kv_cache is None:
        raise ConfigError(f"no GPU memory is left for the KV cache: {plan}; raise gpu_memory or free memory")
    return _Device(
        seqs=256,
        seqs_reason="rows share the reading of the weights",
        budget=8192,
        budget_reason="a chunk of prompt this long fills the GPU",
        depth=2,
        depth_reason="the host plans a step while the GPU runs the one before, but where it drafts"
        if args.speculate != "off"
        else "the host plans a step while the GPU runs the one before",
        kv_memory=max(memory, 0),
        kv_reason=plan,
        kv_format=dtype,
        kv_format_reason="the dtype of the activations",
        kv_fills=True,
    )


def _kv_size(spec: ModelSpec) -> int:
    """Numbers that a token has in the cache."""
    return 2 * spec.num_layers * spec.kv_size


def _refuse_on_gpus(args: EngineArgs) -> None:
    """ConfigError for ways to speculate that a GPU does not know yet."""
    if args.invariant and args.draft_tree:
        raise ConfigError(
            "on a GPU nodes of a token tree are computed by another kernel than a token alone, so with draft_tree "
            "logits are not invariant; leave out draft_tree or invariant"
        )
    if args.draft_tree > _MOST_TREE:
        raise ConfigError(f"draft_tree is at most {_MOST_TREE} on GPUs, not {args.draft_tree}")


def _proposers(args: EngineArgs, drafter: str | None) -> tuple[str, ...]:
    """`drafter`: the proposer that draft_model turned out to be."""
    if args.speculate == "off":
        return ()
    if args.speculate == "auto":
        return tuple(name for name in PROPOSERS if name not in NETWORKS or name == drafter)
    if args.speculate in NETWORKS and args.speculate != drafter:
        names = {"eagle": "an EAGLE head", "medusa": "Medusa heads", "mlp": "an MLP speculator"}
        what = names.get(drafter or "", "a model")
        raise ConfigError(f"draft_model {args.draft_model} is {what}; give speculate={drafter}")
    return (args.speculate,)


def resolve_draft(
    config: EngineConfig, layout: KVLayout, spec: ModelSpec, num_bytes: int, facts: CpuFacts
) -> tuple[KVLayout, Choice]:
    """How the cache of a draft model is cut, whose weights take `num_bytes`, beside a model with `layout`. ConfigError
    if the two do not fit."""
    groups = kv_groups(spec)
    one = KVLayout(
        groups,
        config.block_size,
        1,
        _element_bytes(layout.kv_format, spec.head_dim),
        config.max_num_batched_tokens,
        layout.kv_format,
    )
    tokens = layout.num_blocks * layout.block_size // len(layout.groups)
    most = config.max_num_seqs * one.blocks_for(config.max_model_len)
    num_blocks = max(len(groups) * 2, min(one.blocks_for(tokens), most))
    size = num_blocks * one.block_bytes
    if config.device != "cpu":
        return _draft_cache(replace(one, num_blocks=num_blocks), "room for the tokens that the KV cache holds")
    room = facts.available_memory - config.kv_cache_bytes
    if num_bytes > room:
        raise ConfigError(
            f"the draft model's weights take {_human(num_bytes)}, and {_human(max(room, 0))} are free beside the KV "
            f"cache of {_human(config.kv_cache_bytes)}; take a smaller one or lower kv_cache"
        )
    if num_bytes + size > room:
        num_blocks = max(len(groups) * 2, (room - num_bytes) // one.block_bytes)
        reason = "what is free beside the models' weights and the KV cache; requests beyond it have no drafts"
    else:
        reason = "room for the tokens that the KV cache holds"
    return _draft_cache(replace(one, num_blocks=num_blocks), reason)


def _draft_cache(layout: KVLayout, reason: str) -> tuple[KVLayout, Choice]:
    size = _human(layout.num_blocks * layout.block_bytes)
    what = f"cache of {size}, {layout.num_blocks} blocks of {layout.block_size} tokens"
    return layout, Choice("draft_model", what, reason)


def _element_bytes(kv_format: str, head_dim: int) -> float:
    """Bytes of a number in the KV cache; float16, which only GPUs have, is none of the CPU's formats."""
    return KV_FORMATS[kv_format].vector_bytes(head_dim) / head_dim if kv_format in KV_FORMATS else 2.0


def resolve(
    args: EngineArgs,
    spec: ModelSpec,
    facts: CpuFacts,
    gpu: GpuFacts | None = None,
    num_weights: int = 0,
    drafter: str | None = None,
    draft: ModelSpec | None = None,
) -> tuple[EngineConfig, KVLayout, list[Choice]]:
    """The configuration, the cut of the KV cache, and why; ConfigError if the wishes cannot be met together. With `gpu`
    the models of `num_weights` numbers run there; `drafter` is the proposer that draft_model makes, `draft` what it is
    like where it has a cache."""
    choices: list[Choice] = []
    dtype = "float32"
    if gpu is None:
        if args.dtype not in ("auto", "float32"):
            raise ConfigError(f"dtype {args.dtype} is for GPUs, and none is used; leave it out")
        device = _cpu(args, facts)
    else:
        if args.quantize != "none":
            raise ConfigError("quantize is for CPUs; leave it out or give device=cpu")
        if args.mode in ("fast", "int8"):
            raise ConfigError(f"mode={args.mode} is for CPUs; leave it out or give device=cpu")
        _refuse_on_gpus(args)
        dtype = args.dtype if args.dtype != "auto" else "float32" if args.mode == "exact" else "bfloat16"
        if args.mode == "exact" and dtype != "float32":
            raise ConfigError(f"exact mode computes in float32; leave out dtype {dtype} or the mode")
        device = _gpu(args, spec, gpu, num_weights, dtype, draft)
        choices.append(Choice("device", f"cuda, {gpu.name}", "a GPU is there" if args.device == "auto" else "as asked"))
        choices.append(Choice("dtype", dtype, "as asked" if args.dtype != "auto" else f"of mode {args.mode}"))

    def choose(name: str, said: int | None, default: int, reason: str) -> int:
        value = default if said is None else said
        choices.append(Choice(name, str(value), reason if said is None else "as asked"))
        return value

    mode = "default" if args.mode == "auto" else args.mode
    reason = "rounds what is multiplied with quantised weights: faster than fp32 as soon as requests share a step"
    if gpu is not None:
        reason = "sums in float32 of products in the dtype"
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
    seqs = choose("max_num_seqs", args.max_num_seqs, device.seqs, device.seqs_reason)
    budget = choose(
        "max_num_batched_tokens",
        args.max_num_batched_tokens,
        max(device.budget if args.itl_slo is None else max(_PACED_BUDGET, device.budget), seqs),
        device.budget_reason
        if args.itl_slo is None
        else f"chunks are as long as itl_slo {args.itl_slo:g} ms allows, and at most this",
    )
    if budget < seqs:
        raise ConfigError(f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({seqs})")
    block = choose("block_size", args.block_size, _DEFAULT_BLOCK, "small blocks waste little memory")
    groups = kv_groups(spec)
    element = _element_bytes(device.kv_format, spec.head_dim)
    one = KVLayout(groups, block, 1, element, budget, device.kv_format)
    choices.append(
        Choice("kv_dtype", device.kv_format, device.kv_format_reason if args.kv_dtype == "auto" else "as asked")
    )
    per_sequence = one.blocks_for(max_len)
    if args.kv_cache is not None:
        size = parse_bytes(args.kv_cache, facts.available_memory if gpu is None else gpu.free_memory, "kv_cache")
        reason = "as asked"
    else:
        most = seqs * per_sequence * one.block_bytes
        size = device.kv_memory if device.kv_fills else min(most, device.kv_memory)
        reason = f"room for {seqs} sequences of {max_len} tokens" if size == most else device.kv_reason
    num_blocks = size // one.block_bytes
    if num_blocks < len(groups) * 2:
        raise ConfigError(
            f"kv_cache {_human(size)} holds {num_blocks} blocks of {block} tokens ({_human(one.block_bytes)} each); "
            f"at least {len(groups) * 2} are needed"
        )
    layout = replace(one, num_blocks=num_blocks)
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
    depth = choose("steps_in_flight", args.steps_in_flight, device.depth, device.depth_reason)
    choices.append(
        Choice("prefix_caching", str(args.prefix_caching), "finding a prefix costs less than computing it")
        if args.prefix_caching
        else Choice("prefix_caching", "False", "as asked")
    )
    proposers = _proposers(args, drafter)
    if proposers:
        depth_reason = "as asked" if args.num_draft_tokens else "each step verifies what the cost model finds to pay"
        choices.append(Choice("num_draft_tokens", str(args.num_draft_tokens or f"up to {_MOST_DRAFTS}"), depth_reason))
        if args.draft_tree:
            choices.append(
                Choice("draft_tree", str(args.draft_tree), "as asked: trees of alternatives, so many nodes at most")
            )
        if args.verify != "same":
            choices.append(Choice("verify", args.verify, "as asked: the same distribution, not the same text"))
        if args.synthetic_acceptance is not None:
            reason = "as asked, for benchmarks: the text is not the model's"
            choices.append(Choice("synthetic_acceptance", f"{args.synthetic_acceptance:g}", reason))
        if args.speculate == "auto":
            reason = "for each request and step what pays most, or nothing"
            choices.append(Choice("speculate", ", ".join(proposers), reason))
    if args.quantize != "none":
        choices.append(Choice("quantize", f"{args.quantize}, groups of {args.quantize_group}", "as asked"))
    config = EngineConfig(
        quantize=args.quantize,
        quantize_group=args.quantize_group,
        verify=args.verify,
        synthetic_acceptance=args.synthetic_acceptance,
        suffix_tokens=_SUFFIX_TOKENS if args.suffix_tokens is None else args.suffix_tokens,
        draft_tree=args.draft_tree,
        mode=mode,
        max_model_len=max_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        kv_cache_bytes=size,
        block_size=block,
        num_blocks=num_blocks,
        prefix_caching=args.prefix_caching,
        scheduling=args.scheduling,
        proposers=proposers,
        max_draft_tokens=args.num_draft_tokens or _MOST_DRAFTS,
        fixed_depth=args.num_draft_tokens is not None,
        steps_in_flight=depth,
        ledger=args.ledger,
        num_threads=threads,
        device="cpu" if gpu is None else "cuda",
        dtype=dtype,
        graphs=gpu is not None and args.cuda_graphs,
        step_kernel=args.step_kernel if gpu is not None else "off",
        invariant=args.invariant,
        ttft_slo=None if args.ttft_slo is None else args.ttft_slo / 1e3,
        itl_slo=None if args.itl_slo is None else args.itl_slo / 1e3,
    )
    return config, layout, choices
