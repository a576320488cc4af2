"""Token trees in attention by every code path: the reference's numbers, and a chain's bits."""

from __future__ import annotations

import numpy as np

from attention.test_tree_attention import BACKENDS, BUSHY, LAYERS, Row, check, draw_qkv


def test_code_paths_agree_with_the_reference(path: str) -> None:
    rng = np.random.default_rng(0)
    for name, layer in LAYERS.items():
        before, nodes = draw_qkv(rng, layer, 57), draw_qkv(rng, layer, len(BUSHY))
        found = []
        for backend in BACKENDS:
            row = Row(backend, layer, 16)
            row.run(before)
            found.append(row.run(nodes, BUSHY))
        np.testing.assert_allclose(found[0], found[1], rtol=2e-5, atol=2e-5, err_msg=name)


def test_a_node_is_the_end_of_a_chain(path: str) -> None:
    for kv_format in ("float32", "bfloat16", "int8"):
        check("native", LAYERS["all"], 16, 59, BUSHY, kv_format)
