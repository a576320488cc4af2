"""A peer in an environment of its own: this one file, run by the peer's Python, answers lines of JSON.

    PEER_PYTHON -I peer_script.py transformers|llama.cpp|openvino

It may import nothing of Headrace. Standard input brings one request a line, standard output takes one answer a line:

    {"op": "load", "model": PATH, "dtype": "float32"|"bfloat16", "threads": N}  ->  {"ok": true, "name": "NAME VERSION"}
    {"op": "run", "prompts": [[token id ...] ...], "num_tokens": N}
             ->  {"ok": true, "first_token": SECONDS, "tokens_by_then": N, "total": SECONDS, "num_tokens": GENERATED}
    {"op": "quit"}         ->  the process ends
    what went wrong        ->  {"ok": false, "error": "..."}

A run generates exactly `num_tokens` greedy tokens for each prompt, all of one length, in one batch; its times start
when the token ids are there. `first_token`: when every prompt has its first one; `tokens_by_then`: one a prompt if left
out. Whatever libraries print goes to standard error. Any script that speaks this can be a
peer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class TransformersPeer:
    """transformers, stepped by a loop of its own: less is done between two tokens than in `generate`."""

    def load(self, model: str, dtype: str, threads: int) -> str:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch = torch
        kind = getattr(torch, dtype)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=kind).eval()
        short = {"float32": "fp32", "bfloat16": "bf16"}.get(dtype, dtype)
        return f"transformers {transformers.__version__} {short}"

    def run(self, prompts: list[list[int]], num_tokens: int) -> tuple[float, int, float, int]:
        torch = self._torch
        started = time.perf_counter()
        first = 0.0
        with torch.inference_mode():
            ids, cache = torch.tensor(prompts), None
            for _ in range(num_tokens):
                out = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                ids, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
                ids[0, 0].item()  # the token is known
                first = first or time.perf_counter() - started
        return first, len(prompts), time.perf_counter() - started, len(prompts) * num_tokens


class LlamaCppPeer:
    """llama.cpp through llama-cpp-python's low-level calls: the high-level class runs one sequence at a time."""

    _chunk = 512  # prompt tokens a call of decode

    def load(self, model: str, dtype: str, threads: int) -> str:
        import llama_cpp
        import numpy

        self._lib, self._np, self._threads = llama_cpp, numpy, threads
        llama_cpp.llama_backend_init()
        open_model = getattr(llama_cpp, "llama_model_load_from_file", None) or llama_cpp.llama_load_model_from_file
        self._model = open_model(model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {model}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._room = (0, 0)
        return f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"

    def run(self, prompts: list[list[int]], num_tokens: int) -> tuple[float, int, float, int]:
        lib, count, length = self._lib, len(prompts), len(prompts[0])
        self._make_room(count, length + num_tokens)
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        batch = lib.llama_batch_init(max(self._chunk, count), 0, 1)
        try:
            started = time.perf_counter()
            tokens = [self._prefill(batch, sequence, prompt) for sequence, prompt in enumerate(prompts)]
            first = time.perf_counter() - started
            for position in range(length, length + num_tokens - 1):
                entries = [(token, position, sequence, True) for sequence, token in enumerate(tokens)]
                self._decode(batch, entries)
                tokens = [self._best(index) for index in range(count)]
            return first, count, time.perf_counter() - started, count * num_tokens
        finally:
            lib.llama_batch_free(batch)

    def _make_room(self, count: int, length: int) -> None:
        """A context of `count` sequences of `length` tokens; made anew when the present one is too small."""
        lib = self._lib
        if count <= self._room[0] and length <= self._room[1]:
            return
        if self._context is not None:
            lib.llama_free(self._context)
        length = -(-length // 256) * 256
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = count * length, count
        params.n_batch, params.n_ubatch = max(self._chunk, count), max(self._chunk, count)
        params.n_threads = params.n_threads_batch = self._threads
        make = getattr(lib, "llama_init_from_model", None) or lib.llama_new_context_with_model
        self._context, self._room = make(self._model, params), (count, length)
        if not self._context:
            raise ValueError(f"llama.cpp cannot make a context of {count} x {length} tokens")

    def _prefill(self, batch: Any, sequence: int, prompt: list[int]) -> int:
        """The first token after a prompt."""
        for start in range(0, len(prompt), self._chunk):
            part = prompt[start : start + self._chunk]
            last = len(prompt) - 1
            self._decode(batch, [(t, start + i, sequence, start + i == last) for i, t in enumerate(part)])
        return self._best(-1)

    def _decode(self, batch: Any, entries: list[tuple[int, int, int, bool]]) -> None:
        """Run (token, position, sequence, with logits) entries."""
        batch.n_tokens = len(entries)
        for index, (token, position, sequence, logits) in enumerate(entries):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = logits
        status = self._lib.llama_decode(self._context, batch)
        if status:
            raise ValueError(f"llama_decode gave {status}")

    def _best(self, index: int) -> int:
        pointer = self._lib.llama_get_logits_ith(self._context, index)
        return int(self._np.ctypeslib.as_array(pointer, shape=(self._vocab,)).argmax())


class OpenVinoPeer:
    """openvino-genai's continuous batching, stepped by a loop of its own, on a GGUF file or an exported folder."""

    def load(self, model: str, dtype: str, threads: int) -> str:
        from importlib.metadata import version

        import numpy
        import openvino
        import openvino_genai

        self._np, self._openvino, self._genai = numpy, openvino, openvino_genai
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.enable_prefix_caching = False
        scheduling.max_num_batched_tokens, scheduling.cache_size = 2048, 2
        settings = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduling, "CPU", settings)
        kind = "GGUF" if os.path.isfile(model) else os.path.basename(os.path.normpath(model))
        return f"openvino-genai {version('openvino-genai')} {kind}"

    def run(self, prompts: list[list[int]], num_tokens: int) -> tuple[float, int, float, int]:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.ignore_eos, config.do_sample = True, False
        tensors = [self._openvino.Tensor(self._np.array([prompt], self._np.int64)) for prompt in prompts]
        started, first, by_then = time.perf_counter(), 0.0, 0
        handles = [self._pipeline.add_request(number, tensor, config) for number, tensor in enumerate(tensors)]
        counts = [0] * len(handles)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for number, handle in enumerate(handles):
                if handle.can_read():
                    counts[number] += sum(len(part.generated_ids) for part in handle.read().values())
            if not first and all(counts):
                first, by_then = time.perf_counter() - started, sum(counts)
        return first, by_then, time.perf_counter() - started, sum(counts)


PEERS = {"transformers": TransformersPeer, "llama.cpp": LlamaCppPeer, "openvino": OpenVinoPeer}


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not meet the answers
    peer: Any = PEERS[sys.argv[1]]()
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "quit":
            break
        try:
            if request["op"] == "load":
                answer = {"ok": True, "name": peer.load(request["model"], request["dtype"], request["threads"])}
            else:
                first, by_then, total, count = peer.run(request["prompts"], request["num_tokens"])
                answer = {"ok": True, "first_token": first, "tokens_by_then": by_then}
                answer |= {"total": total, "num_tokens": count}
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
