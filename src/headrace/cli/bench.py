"""`headrace bench`: how fast this machine runs a model, and what bounds it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli import bench_serve
from headrace.cli.options import add_engine_options, add_ledger_option, engine_args, engine_flags, stream_ledger

if TYPE_CHECKING:
    from headrace.bench.results import Row
    from headrace.frontend.llm import LLM


def add_commands(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("bench", help="measure speed", description="Measure speed on this machine.")
    kinds = parser.add_subparsers(title="benchmarks", metavar="KIND", required=True)
    latency_parser = kinds.add_parser("latency", help="one batch of requests that start together")
    latency_parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="requests (default 1)")
    latency_parser.set_defaults(command=latency)
    throughput_parser = kinds.add_parser("throughput", help="many requests queued at once")
    throughput_parser.add_argument("--num-requests", type=int, default=32, metavar="N", help="requests (default 32)")
    throughput_parser.set_defaults(command=throughput)
    bench_serve.add_command(kinds)
    tiles_parser = kinds.add_parser(
        "tiles", help="on a GPU: find the fastest cut of each of a model's products, for every later start"
    )
    tiles_parser.add_argument(
        "-m", "--model", metavar="MODEL", help="as for other commands; its config is all it needs"
    )
    tiles_parser.set_defaults(command=tiles)
    attention_parser = kinds.add_parser(
        "attention", help="on a GPU: find where each kernel of a model's attention is fastest, for every later start"
    )
    attention_parser.add_argument(
        "-m", "--model", metavar="MODEL", help="as for other commands; its config is all it needs"
    )
    attention_parser.set_defaults(command=attention)
    compare_parser = kinds.add_parser("compare", help="the same work through Headrace and peers, in turns")
    compare_parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="PEER",
        help="transformers, llama.cpp, openvino, or a script that speaks the protocol; may be repeated",
    )
    compare_parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="FILE",
        help="the Python of each peer's environment, or one for all (this one)",
    )
    compare_parser.add_argument(
        "--peer-model",
        action="append",
        default=[],
        metavar="PATH",
        help="what each peer loads in place of the model, in the order of the peers; '': the model",
    )
    compare_parser.add_argument(
        "--peer-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="arithmetic of a transformers peer (float32)",
    )
    compare_parser.add_argument(
        "--decode-batch",
        type=int,
        action="append",
        metavar="N",
        help="decode with N requests; may be repeated (1 and 8, unless others are given)",
    )
    compare_parser.add_argument(
        "--ttft",
        type=int,
        action="append",
        metavar="N",
        help="time to the first token after N; may be repeated (512, unless others are given)",
    )
    compare_parser.add_argument(
        "--offline",
        type=int,
        action="append",
        metavar="N",
        help="N requests queued at once; may be repeated (32, unless others are given)",
    )
    compare_parser.add_argument(
        "--start", action="store_true", help="whole processes: from the command to the first token, and memory at most"
    )
    compare_parser.add_argument("--vs", choices=("vllm", "nobody"), help="the GPU table beside this engine")
    compare_parser.add_argument(
        "--case", action="append", default=[], metavar="NAME", help="with --vs: only this row; may be repeated"
    )
    compare_parser.add_argument(
        "--peer-gpu", type=int, metavar="N", help="with --vs: the peer runs at the same time, on GPU N"
    )
    compare_parser.add_argument(
        "--from-logs", action="store_true", help="with --vs: run nothing, make the table of the logs that are there"
    )
    compare_parser.add_argument("--cold", action="store_true", help="with --vs: both sides start with empty caches")
    compare_parser.add_argument(
        "--logs", metavar="FOLDER", default="bench-logs", help="with --vs: what both sides said (default bench-logs)"
    )
    compare_parser.set_defaults(command=compare)
    for each, prompt_len in ((latency_parser, 32), (throughput_parser, 128), (compare_parser, 32)):
        each.add_argument("--prompt-len", type=int, default=prompt_len, metavar="N", help=f"default {prompt_len}")
        each.add_argument("--output-len", type=int, default=64, metavar="N", help="tokens a request (default 64)")
        each.add_argument("--runs", type=int, default=3, metavar="N", help="counted runs after one warm-up (default 3)")
        each.add_argument("--json", metavar="FILE", help="write a results file")
        each.add_argument("--explain", action="store_true", help="say where the time went")
        add_ledger_option(each)
        add_engine_options(each)


def _check(arguments: argparse.Namespace, *names: str) -> None:
    for name in (*names, "prompt_len", "output_len", "runs"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")


def _report(arguments: argparse.Namespace, llm: LLM, name: str, rows: list[Row]) -> int:
    from headrace.bench.results import write_results
    from headrace.ledger.explain import conclusion

    for row in rows:
        print(row.line())
    print(conclusion(llm.engine.ledger))
    if arguments.explain:
        print(llm.explain())
    if arguments.json:
        write_results(arguments.json, name, rows)
    return 0


def latency(arguments: argparse.Namespace) -> int:
    _check(arguments, "batch_size")
    from headrace.bench.measure import median, random_prompts, run_batch
    from headrace.bench.results import Row
    from headrace.frontend.llm import LLM

    with LLM.from_args(engine_args(arguments)) as llm:
        stream_ledger(arguments, llm.engine.ledger)
        prompts = random_prompts(llm.engine.spec.vocab_size, arguments.batch_size, arguments.prompt_len)
        run_batch(llm, prompts, min(8, arguments.output_len))
        timings = [run_batch(llm, prompts, arguments.output_len) for _ in range(arguments.runs)]
        what = f"{llm.engine.checkpoint.name} {llm.engine.config.label}"
        batch, runs = arguments.batch_size, arguments.runs
        rows = [
            Row(f"{what} ttft {arguments.prompt_len} batch {batch}", "ms", "lower",
                median([t.first_token * 1e3 for t in timings]), runs=runs),
        ]  # fmt: skip
        if arguments.output_len > 1:  # of one token there is no decoding
            rate = median([t.decode_rate for t in timings])
            rows.append(Row(f"{what} decode batch {batch}", "tok/s", "higher", rate, runs=runs))
        return _report(arguments, llm, "latency", rows)


def throughput(arguments: argparse.Namespace) -> int:
    _check(arguments, "num_requests")
    from headrace.bench.measure import median, random_prompts, run_batch
    from headrace.bench.results import Row
    from headrace.frontend.llm import LLM

    with LLM.from_args(engine_args(arguments)) as llm:
        stream_ledger(arguments, llm.engine.ledger)
        prompts = random_prompts(llm.engine.spec.vocab_size, arguments.num_requests, arguments.prompt_len)
        run_batch(llm, prompts[:1], 2)
        timings = [run_batch(llm, prompts, arguments.output_len) for _ in range(arguments.runs)]
        what = f"{llm.engine.checkpoint.name} {llm.engine.config.label}"
        case = f"{what} offline {arguments.num_requests} x {arguments.prompt_len}+{arguments.output_len}"
        rows = [Row(case, "tok/s", "higher", median([t.output_rate for t in timings]), runs=arguments.runs)]
        return _report(arguments, llm, "throughput", rows)


def tiles(arguments: argparse.Namespace) -> int:
    from headrace.bench.gpu import tune_model

    print(f"written: {tune_model(arguments.model, say=lambda line: print(line, flush=True))}")
    return 0


def attention(arguments: argparse.Namespace) -> int:
    from headrace.bench.gpu import need_gpu

    need_gpu("attention is measured on a GPU")
    from headrace.bench.attention import tune_model_attention

    print(f"written: {tune_model_attention(arguments.model, say=lambda line: print(line, flush=True))}")
    return 0


def _compare_on_gpu(arguments: argparse.Namespace) -> int:
    from headrace.bench.gpu import Setup, compare_on_gpu, need_gpu, table_of_logs, write_table

    pythons = arguments.peer_python or [sys.executable]
    setup = Setup(
        engine_args(arguments).model or "llama-3.1-8b",
        None if arguments.vs == "nobody" else arguments.vs,
        pythons[0],
        arguments.peer_gpu,
        arguments.runs,
        arguments.case,
        arguments.offline[0] if arguments.offline else None,
        arguments.cold,
    )
    logs, missing = Path(arguments.logs), list[str]()
    if arguments.from_logs:
        rows, missing = table_of_logs(setup.model, logs, setup.peer, setup.cold)
    else:
        need_gpu("--vs compares on a GPU")
        rows = compare_on_gpu(setup, logs, tell=_tell)
    for row in rows:
        print(row.line())
    if missing:
        print(f"no value of one side: {', '.join(missing)}", file=sys.stderr)
    if arguments.json:
        write_table(Path(arguments.json), rows, missing)
    return 0


def _tell(text: str) -> None:
    print(f"[{text}]", file=sys.stderr)


def compare(arguments: argparse.Namespace) -> int:
    _check(arguments)
    if arguments.vs:
        return _compare_on_gpu(arguments)
    given = (arguments.decode_batch, arguments.ttft, arguments.offline)
    decodes, ttfts, offlines = given if any(given) or arguments.start else ([1, 8], [512], [32])
    for name, values in (("decode-batch", decodes), ("ttft", ttfts), ("offline", offlines)):
        if any(value < 1 for value in values or ()):
            raise ValueError(f"--{name} must be at least 1")
    if decodes and arguments.output_len < 2:
        raise ValueError("--output-len must be at least 2 for decode")
    pythons = arguments.peer_python or [sys.executable]
    if len(pythons) == 1:
        pythons = pythons * len(arguments.peer)
    if len(pythons) != len(arguments.peer):
        raise ValueError(f"{len(arguments.peer)} --peer, but {len(pythons)} --peer-python: give one, or one for each")
    models = arguments.peer_model or [""] * len(arguments.peer)
    if len(models) != len(arguments.peer):
        raise ValueError(f"{len(arguments.peer)} --peer, but {len(models)} --peer-model: give none, or one for each")
    from headrace.bench.compare import PeerChoice, Work, tell_if_busy
    from headrace.bench.compare import compare as measure
    from headrace.bench.start import compare_starts
    from headrace.frontend.llm import LLM

    prompt, output = arguments.prompt_len, arguments.output_len
    works = [Work("decode", count, prompt, output) for count in decodes or ()]
    works += [Work("ttft", 1, length, 1) for length in ttfts or ()]
    works += [Work("offline", count, prompt, output) for count in offlines or ()]
    with LLM.from_args(engine_args(arguments)) as llm:
        stream_ledger(arguments, llm.engine.ledger)
        rows = llm.engine.config.max_num_seqs
        if any(work.kind == "decode" and work.count > rows for work in works):
            raise ValueError(f"a decode batch above max_num_seqs ({rows}) does not run as one; raise --max-num-seqs")
        choices = [PeerChoice(*each) for each in zip(arguments.peer, pythons, models, strict=True)]
        results: list[Row] = []
        if works:
            results += measure(
                llm, works, choices, runs=arguments.runs, dtype=arguments.peer_dtype, tell=_tell
            )  # fmt: skip
        if arguments.start:
            if not works:  # after them the load is our own
                tell_if_busy(_tell)
            results += compare_starts(llm, choices, options=engine_flags(arguments), runs=arguments.runs,
                                      dtype=arguments.peer_dtype, tell=_tell)  # fmt: skip
        return _report(arguments, llm, "compare", results)
