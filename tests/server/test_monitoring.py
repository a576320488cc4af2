"""docs/monitoring: the dashboard and the alert rules name metrics that there are, and promtool accepts the rules."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from harness import Server, serve_command, until

FOLDER = Path(__file__).parent.parent.parent / "docs" / "monitoring"
NAME = re.compile(r"\bheadrace_\w+")
TYPES = {"row", "stat", "timeseries"}
UNITS = {"short", "s", "reqps", "percentunit"}


@pytest.fixture(scope="module")
def exported(server: Server) -> set[str]:
    """Sample names of a server that has answered something."""
    server.chat(max_tokens=3, ignore_eos=True)
    until(lambda: server.metric("headrace_requests_total") > 0)
    lines = server.get("/metrics").data.decode().splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if line and not line.startswith("#")}


def dashboard() -> dict:
    return json.loads((FOLDER / "dashboard.json").read_text())


def test_the_dashboard_has_grafanas_form():
    board = dashboard()
    assert board["title"] and board["uid"] and isinstance(board["schemaVersion"], int) and board["panels"]
    variables = {each["name"] for each in board["templating"]["list"]}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["type"] in TYPES and panel["title"], panel["id"]
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24 and place["h"] > 0, panel["title"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken, f"{panel['title']} lies over another"
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        for target in panel["targets"]:
            assert set(re.findall(r"\$\{?(\w+)", json.dumps(target))) <= variables | {"__rate_interval"}
            assert "$instance" in target["expr"] and target["expr"].count("(") == target["expr"].count(")")


def test_the_dashboard_shows_what_there_is(exported):
    named = set(NAME.findall((FOLDER / "dashboard.json").read_text()))
    assert len(named) > 15 and named <= exported, named - exported


def test_alerts_watch_what_there_is(exported):
    lines = (FOLDER / "alerts.yml").read_text().splitlines()
    named = set(NAME.findall("\n".join(line for line in lines if "description:" not in line)))
    assert len(named) > 7 and named <= exported, named - exported


def test_the_list_of_metrics_is_whole(exported):
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported if not name.endswith("_created")}
    listed = set(NAME.findall((FOLDER / "README.md").read_text()))
    assert families == listed


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool: apt-get install prometheus")
@pytest.mark.parametrize(
    "arguments", [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"],
                  ["check", "config", "prometheus.yml"]],
)  # fmt: skip
def test_promtool_accepts_them(arguments):
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_acceptance_of_drafts_is_counted(tiny_model):
    with Server(serve_command(tiny_model, "--speculate", "ngram", "--num-draft-tokens", "4")) as server:
        server.text("abcabcabcabcabcabcabc", max_tokens=200, ignore_eos=True, temperature=0)
        until(lambda: server.metric("headrace_engine_draft_tokens_total") > 0)
        accepted = server.metric("headrace_engine_accepted_draft_tokens_total")
        drafted = server.metric("headrace_engine_draft_tokens_total")
        assert 0 < accepted <= drafted
        assert server.metric("headrace_drafts_verified_by_proposer_total", proposer="ngram") == drafted
        assert server.metric("headrace_drafts_accepted_by_proposer_total", proposer="ngram") == accepted
        first = server.metric("headrace_drafts_accepted_by_position_total", position="1")
        assert first >= server.metric("headrace_drafts_accepted_by_position_total", position="4") > 0


def test_a_request_chooses_who_drafts_for_it(tiny_model):
    with Server(serve_command(tiny_model, "--speculate", "auto", "--num-draft-tokens", "4")) as server:
        fields = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
        expected = server.text("abcabcabcabcabcabcabc", **fields, speculative={"off": True}).json["choices"][0]["text"]
        assert server.metric("headrace_engine_draft_tokens_total") == 0
        for method, count in (("ngram", 1), ("suffix", 2)):
            wish = {"method": method, "num_tokens": count}
            whole = server.text("abcabcabcabcabcabcabc", **fields, speculative=wish).json
            assert whole["choices"][0]["text"] == expected
            labels = {"proposer": method}
            until(lambda labels=labels: server.metric("headrace_drafts_accepted_by_proposer_total", **labels) > 0)
        for wish in ({"method": "draft"}, {"method": "magic"}, {"num_tokens": 0}, {"k": 1}, 3, {"off": 1}):
            answer = server.text("abc", **fields, speculative=wish)
            assert answer.status == 400, wish
            assert answer.json["error"]["param"] == "speculative"
            if wish == {"method": "draft"}:
                assert answer.json["error"]["message"].startswith("speculative.method draft: this engine has no such")
        assert answer.json["error"]["message"] == "speculative: off must be true or false, not a number"
        whole = server.text("abcabcabcabcabcabcabc", **fields, speculative={"off": None, "method": None}).json
        assert whole["choices"][0]["text"] == expected


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool: apt-get install prometheus")
def test_promtool_accepts_the_metrics(server):
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=server.get("/metrics").data.decode(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (0, 3), done.stderr  # 3: matters of taste
    assert "error while linting" not in done.stderr and "non-histogram" not in done.stderr, done.stderr
