"""Thresholds of attention: read, merged, obeyed, and made by `headrace bench attention`."""

import pytest
import torch

from headrace.attention.base import LayerAttention
from headrace.attention.triton import TritonAttention
from headrace.bench import attention as bench
from headrace.bench.attention import Grid, Timing, derive_rule
from headrace.cli.main import main
from headrace.core.kv_layout import KVGroup
from headrace.ops.triton import attention_table
from headrace.ops.triton.attention_table import (
    NEVER,
    AttentionRule,
    AttentionShape,
    attention_rule,
    default_rule,
    read_rules,
    write_rules,
)
from headrace.ops.triton.paged import HeadShape
from headrace.ops.triton.runtime import INTERPRETED

SHAPE, OTHER = AttentionShape(4, 2, 32, "float32"), AttentionShape(8, 8, 64, "bfloat16")
RULE = AttentionRule(alone_from=100, fused_rows=3, split_rows=5)


def test_what_is_written_is_read_and_older_entries_stay(tmp_path):
    path = tmp_path / "attention" / "gpu.json"
    write_rules(path, "a GPU", {SHAPE: default_rule(SHAPE), OTHER: RULE})
    write_rules(path, "a GPU", {SHAPE: RULE})
    assert read_rules(path) == {SHAPE: RULE, OTHER: RULE}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"rules": 3}',
        '{"rules": [{"shape": {}}]}',
        '{"rules": [{"shape": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": "float32"},'
        ' "rule": {"alone_from": -1, "fused_rows": 1, "split_rows": 1}}]}',
    ],
)
def test_a_damaged_table_is_named(tmp_path, text):
    path = tmp_path / "gpu.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"gpu\.json is no table of thresholds .* bench attention"):
        read_rules(path)


def test_a_damaged_table_is_told_before_anything_is_measured(monkeypatch, tmp_path):
    """It could not be added to afterwards."""
    path = tmp_path / "gpu.json"
    path.write_text("{}")
    monkeypatch.setattr(bench, "measured_rules", lambda: read_rules(path))
    monkeypatch.setattr(bench, "resolve_model", lambda name: pytest.fail("it went on"))
    with pytest.raises(ValueError, match=r"remove it, then run headrace bench attention again"):
        bench.tune_model_attention("a model", say=print)


def test_an_engine_obeys_what_was_measured(monkeypatch, device):
    monkeypatch.setattr(attention_table, "measured_rules", lambda: {SHAPE: RULE})
    assert attention_rule(HeadShape(4, 2, 32), torch.float32) == RULE
    assert attention_rule(HeadShape(4, 2, 32), "bfloat16") == default_rule(SHAPE), "of this nothing was measured"
    backend = TritonAttention(16)
    backend.kv_format = "float32"
    backend.reserve((KVGroup((0,), 2, 32, None),), 4, 8, device)
    assert backend._rules == [RULE]


@pytest.mark.skipif(INTERPRETED, reason="where kernels are interpreted, the library's attention is not used")
def test_prompts_alone_obey_what_was_measured(monkeypatch):
    shape = AttentionShape(4, 2, 32, "bfloat16")
    monkeypatch.setattr(attention_table, "measured_rules", lambda: {shape: RULE})
    assert TritonAttention.alone_from([LayerAttention(1.0, 4, 2, 32)], torch.bfloat16) == 100


def timing(kind, size, context, first, second):
    return Timing(kind, size, context, {"first": first, "second": second})


def test_thresholds_are_where_gains_end():
    found = derive_rule(
        [
            timing("decode", 8, 256, 1.0, 1.2),
            timing("decode", 8, 2048, 1.1, 1.0),  # on the whole a gain
            timing("decode", 16, 256, 1.2, 1.0),
            timing("decode", 32, 256, 1.0, 1.2),  # by chance
            timing("short spans", 1, 256, 2.0, 1.0),
            timing("prompt", 128, 128, 1.0, 1.1),  # by chance
            timing("prompt", 256, 256, 1.1, 1.0),
            timing("prompt", 512, 512, 1.0, 1.1),
        ],
        RULE,
    )
    assert found == AttentionRule(fused_rows=8, split_rows=0, alone_from=512)
    assert derive_rule([], RULE) == RULE
    assert derive_rule([timing("prompt", 128, 128, 2.0, 1.0)], RULE).alone_from == NEVER


def test_every_shape_is_measured_with_every_kernel(device, dtype, monkeypatch):
    """Both kernels of a kind give the same output, where they are given the same queries."""
    monkeypatch.setattr(bench, "_RING_BYTES", 1 << 16)
    outputs, steps, made = [], [], bench.Step

    def step(*arguments):
        steps.append(made(*arguments))
        return steps[-1]

    def timer(body):
        body(0)
        outputs.append(steps[-1].out.float().clone())
        return float(len(outputs))

    monkeypatch.setattr(bench, "Step", step)
    grid = Grid(decode_rows=(1, 3), span_rows=(2,), contexts=(40, 100, 10**6), prompts=(24,))
    found = bench.measure(HeadShape(4, 2, 32), dtype, grid, device, timer, tell=lambda timing: None)
    assert [(each.kind, each.size, each.context) for each in found] == [
        *(("decode", rows, context) for rows in (1, 3) for context in (40, 100)),
        ("short spans", 2, 40),
        ("short spans", 2, 100),
        ("prompt", 24, 24),
    ]
    for each, one, other in zip(found, outputs[::2], outputs[1::2], strict=True):
        if each.kind != "prompt":  # the library's keys are not those in the pages
            assert torch.allclose(one, other, atol=3e-2, rtol=3e-2)
    assert found[0].line() == "decode         1 x     40: fused 1.0 us, apart 2.0 us"


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU here")
def test_without_a_gpu_the_command_says_so(capsys):
    assert main(["bench", "attention"]) == 2
    assert "attention is measured on a GPU" in capsys.readouterr().err
