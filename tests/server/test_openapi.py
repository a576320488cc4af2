"""The OpenAPI document, and what Schemathesis makes of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from harness import CHAT, TEXT, alive, fixed

from headrace.frontend.openai_request import known_fields
from headrace.server.app import _GENERATION, _ROUTES

EXAMPLES = os.environ.get("HEADRACE_SCHEMATHESIS_EXAMPLES", "20")
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "negative_data_rejection", "unsupported_method",
)  # fmt: skip


@pytest.fixture(scope="module")
def document(server):
    return server.get("/openapi.json").json


def test_every_route_is_described(document):
    fixed_paths = {path for path in document["paths"] if "{" not in path}
    assert fixed_paths == {*_ROUTES, *_GENERATION, "/v1/messages/count_tokens"} - {"/"}
    assert document["paths"][TEXT]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"][
        "model"
    ]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_field_is_known(document, path):
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    own = {"priority", "cache_salt", "timeout", "return_tokens_as_token_ids", "echo", "tools", "tool_choice"}
    own |= {"parallel_tool_calls", "reasoning_effort", "include_reasoning"}
    assert set(schema["properties"]) <= known_fields(path) | own


@pytest.mark.slow
def test_schemathesis(server, tmp_path):
    """No 5xx, nothing that the document does not say, nothing wrong taken for right. What is right alone but not
    together is refused with 400, so it is not asked that all right bodies are taken."""
    pytest.importorskip("schemathesis")
    expected = fixed(server)
    # a request may set itself a timeout that cannot be kept: 504 is the right answer then
    (tmp_path / "schemathesis.toml").write_text(
        '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]\n'
    )
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", ",".join(CHECKS),
        "--phases", "examples,coverage,fuzzing", "--max-examples", EXAMPLES, "--seed", "1", "--request-timeout", "30",
        "--continue-on-failure", "--no-color",
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    alive(server, expected)
