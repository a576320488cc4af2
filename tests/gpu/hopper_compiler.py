"""Compiles, for a Hopper GPU and without one, every kernel that an engine calls; kernels do nothing here.

    python hopper_compiler.py MODEL [OPTION=VALUE ...]

Triton's interpreter forgives what its compiler refuses (a variable of a loop that changes its type, a shape that is no
power of two), so kernels that were only interpreted may fail on a GPU. Prints a line a kernel with its shared memory.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

import headrace.frontend.engine as engine_module
from headrace import LLM, SamplingParams
from headrace.device.cuda import GpuFacts
from headrace.ledger.machine import machine_facts
from headrace.ops.triton import runtime

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64",
    torch.float64: "fp64", torch.uint8: "u8", torch.int8: "i8", torch.bool: "i1", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "launch_pdl")
seen: set[tuple[Any, ...]] = set()


def compile_call(kernel: runtime.Kernel, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Compile what this call would need, as Triton specialises it."""
    names = kernel.jit.arg_names
    signature: dict[str, str] = {}
    known: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (name, value) in enumerate(zip(names, arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            signature[name], known[(index,)] = "constexpr", 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    options = {name: constants[name] for name in OPTIONS if name in constants}
    for name, value in constants.items():
        if name not in OPTIONS:
            signature[name], known[(names.index(name),)] = "constexpr", value
    key = (kernel.jit.__name__, *signature.items(), *known.items(), *options.items(), *attributes)
    if key in seen:
        return
    seen.add(key)
    compiled = compile(ASTSource(kernel.jit, signature, known, attributes), target=HOPPER, options=options)
    shared = compiled.metadata.shared
    print(f"{kernel.jit.__name__} {options} shared {shared} bytes")
    assert shared <= 227 << 10, "more shared memory than a processor of a Hopper GPU has"


def main() -> None:
    runtime.Kernel._call = lambda self, grid, arguments, constants: compile_call(self, arguments, constants)
    runtime.KNOWN_INSIDE = True
    runtime.dependent_launch = lambda: True
    fake = GpuFacts("none", (9, 0), 8 << 30, 8 << 30, 132)
    engine_module.choose_gpu = lambda name: fake
    engine_module.gpu_machine_facts = lambda name: machine_facts()
    from headrace.worker.device_worker import DeviceWorker

    def make_worker(spec: Any, checkpoint: Any, config: Any, layout: Any, backend: Any, grammars: Any, draft: Any):
        return DeviceWorker(
            spec, checkpoint, config, layout, backend, grammars, device=torch.device("cpu"), draft=draft
        )

    engine_module.make_worker = make_worker
    words = dict(word.split("=") for word in sys.argv[2:])
    options: dict[str, Any] = {
        name: value == "True" if value in ("True", "False") else int(value) if value.isdigit() else value
        for name, value in words.items()
    }
    params = [
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=5, seed=1, max_tokens=3, ignore_eos=True),
    ]
    limits = {"max_model_len": 256, "max_num_batched_tokens": 128, "max_num_seqs": 8, "kv_cache": "4MiB"}
    with LLM(sys.argv[1], device="cuda", **limits, **options) as llm:
        llm.generate([list(range(40)), [1, 2, 3]], params)
        llm.generate([[4, 5, 6]], params[:1])  # a short span, alone
        runner = llm.engine._worker.runner
        for key in [key for key in runner.launcher.other_keys() if key.tree][::20]:
            runner.rehearse(key, key.warm, key.cut)  # drafts never come true here
    print(f"compiled {len(seen)} variants")


if __name__ == "__main__":
    main()
