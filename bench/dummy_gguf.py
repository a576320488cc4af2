"""A GGUF file of a large model's shape with random weights, to compare speed with other engines that read GGUF.

    python bench/dummy_gguf.py llama-3.1-8b --tokenizer MODEL.gguf -o dummy-8b-q4_0.gguf

Matrices are Q4_0 and the head Q8_0; the tokenizer, and with it the size of the vocabulary, is that of the other file.
Numbers are finite and small, the text they make means nothing, and nothing about speed depends on them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from headrace.bench.shapes import SHAPES

Q4_0, Q8_0 = (GGMLQuantizationType.Q4_0, 18), (GGMLQuantizationType.Q8_0, 34)  # type, bytes of a block of 32 weights
SCALE = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)


def blocks(rng: np.random.Generator, rows: int, columns: int, size: int) -> np.ndarray:
    """uint8 [rows, bytes of a row]: a scale of 0.01, then random integers."""
    made = rng.integers(0, 256, (rows, columns // 32, size), np.uint8)
    made[:, :, :2] = SCALE
    return made.reshape(rows, -1)


def copy_tokenizer(reader: GGUFReader, writer: GGUFWriter) -> int:
    """Take over what the other file says of its tokenizer; returns the number of tokens."""
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, inner)
    return len(reader.fields["tokenizer.ggml.tokens"].data)


def write(shape: dict[str, Any], tokenizer: Path, path: Path) -> None:
    hidden, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    dim = shape.get("head_dim", hidden // heads)
    writer = GGUFWriter(path, "llama", use_temp_file=True)
    vocabulary = copy_tokenizer(GGUFReader(tokenizer), writer)
    writer.add_name(path.stem)
    writer.add_block_count(layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    rng = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int, kind: tuple[GGMLQuantizationType, int] = Q4_0) -> None:
        writer.add_tensor(f"{name}.weight", blocks(rng, rows, columns, kind[1]), raw_dtype=kind[0])

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))

    matrix("token_embd", vocabulary, hidden, Q8_0)
    for index in range(layers):
        layer = f"blk.{index}"
        norm(f"{layer}.attn_norm")
        matrix(f"{layer}.attn_q", heads * dim, hidden)
        matrix(f"{layer}.attn_k", kv_heads * dim, hidden)
        matrix(f"{layer}.attn_v", kv_heads * dim, hidden)
        matrix(f"{layer}.attn_output", hidden, heads * dim)
        norm(f"{layer}.ffn_norm")
        matrix(f"{layer}.ffn_gate", inner, hidden)
        matrix(f"{layer}.ffn_up", inner, hidden)
        matrix(f"{layer}.ffn_down", hidden, inner)
    norm("output_norm")
    matrix("output", vocabulary, hidden, Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--tokenizer", type=Path, required=True, help="GGUF file whose tokenizer is taken over")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    write(SHAPES[arguments.shape], arguments.tokenizer, arguments.output)
    print(f"{arguments.output}: {arguments.output.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
