"""The GPU table without a GPU: cases, the measuring code that both sides run, and how two processes become rows."""

from pathlib import Path

import pytest

from headrace.bench import gpu, gpu_side

FAKE = """
import json, sys
work = json.load(sys.stdin)
factor = {"headrace": 1.0, "vllm": 2.0}[sys.argv[1]]
print("a library says hello")
print(json.dumps({"case": "start", "name": sys.argv[1] + " 1.0"}), flush=True)
for case in work["cases"]:
    if sys.argv[1] == "vllm" and "FAIL" in work["model"]:
        sys.exit(3)
    print(json.dumps({"case": case["name"], "value": factor, "values": [factor] * 3, "limit_share": 0.5}), flush=True)
"""


class CountingEngine:
    """Takes no time; remembers what it was asked for."""

    name = "fake"

    def __init__(self):
        self.asked = []

    def settle(self):
        pass

    def generate(self, prompts, lengths, temperature):
        self.asked.append(([len(prompt) for prompt in prompts], list(lengths), temperature))

    def share(self, prefill):
        return None


@pytest.fixture
def fake_sides(tmp_path, monkeypatch):
    script = tmp_path / "side.py"
    script.write_text(FAKE)
    monkeypatch.setattr(gpu, "SCRIPT", script)
    return tmp_path


def test_every_model_has_cases_of_distinct_names():
    for model, cases in gpu.CASES.items():
        names = [case.name for case in cases]
        assert len(set(names)) == len(names), model


@pytest.mark.parametrize(
    "case",
    [
        gpu.Case("decode", batch=3),
        gpu.Case("decode", batch=2, context=400),
        gpu.Case("skewed", batch=4, context=500),
        gpu.Case("ttft", tokens=70),
        gpu.Case("offline", requests=5),
    ],
    ids=lambda case: case.name,
)
def test_both_sides_are_asked_for_the_same_work(case):
    def asked():
        engine = CountingEngine()
        values = gpu_side.Runs(engine, 2).measure({**vars(case), "name": case.name})
        return engine.asked, len(values)

    first, second = asked(), asked()
    assert first == second
    prompts, lengths, _ = first[0][-1]
    if case.kind == "decode":
        assert prompts == [128 if case.context is None else 200] * case.batch
        assert lengths == [gpu_side.SHORT + (128 if case.context is None else 64)] * case.batch
    if case.kind == "skewed":
        assert prompts == [500, 1000, 1000, 1000]
    if case.kind == "ttft":
        assert (prompts, lengths) == ([70], [1])
    if case.kind == "offline":
        assert len(prompts) == 5 and all(100 <= n <= 1024 for n in prompts + lengths)


@pytest.mark.parametrize("peer_device", [None, 0])
def test_rows_of_two_sides(fake_sides, peer_device):
    setup = gpu.Setup("tiny", peer_device=peer_device)
    rows = gpu.compare_on_gpu(setup, fake_sides / "logs", tell=lambda text: None)
    assert [row.case for row in rows] == [
        "tiny bf16 start-warm", "tiny bf16 decode batch 2", "tiny bf16 ttft 64", "tiny bf16 offline",
    ]  # fmt: skip
    assert [row.ratio for row in rows[1:]] == [2.0, 2.0, 0.5], "more tokens a second are better, more milliseconds not"
    assert rows[1].peer_name == "vllm 1.0" and rows[1].limit_share == 0.5 and rows[1].runs == 3
    assert "a library says hello" in (fake_sides / "logs" / "tiny.vllm.log").read_text()


def test_a_side_that_fails_is_named_with_its_log(fake_sides):
    with pytest.raises(ValueError, match=r"vllm ended with exit code 3; its output is in .*vllm\.log"):
        gpu.compare_on_gpu(gpu.Setup("FAIL"), fake_sides / "logs", tell=lambda text: None)


def test_one_case_or_only_the_start(fake_sides):
    setup = gpu.Setup("tiny", peer=None, names=["start"], cold=True)
    (row,) = gpu.compare_on_gpu(setup, fake_sides / "logs", tell=lambda text: None)
    assert row.case == "tiny bf16 start-cold" and row.peer is None
    with pytest.raises(ValueError, match="no case 'decode batch 3'; there are"):
        gpu.chosen_cases(gpu.Setup("tiny", names=["decode batch 3"]))


def test_the_side_needs_nothing_but_the_engine():
    assert "headrace" not in {
        line.split()[1].split(".")[0]
        for line in Path(gpu_side.__file__).read_text().splitlines()
        if line.startswith(("import ", "from "))
    }


def test_a_table_of_logs_of_a_run_that_was_broken_off(fake_sides):
    logs = fake_sides / "logs"
    whole = gpu.compare_on_gpu(gpu.Setup("tiny"), logs, tell=lambda text: None)
    assert gpu.table_of_logs("tiny", logs, "vllm", False) == (whole, [])
    ours = logs / gpu.log_name("tiny", "headrace", False)
    ours.write_text("".join(line for line in ours.read_text().splitlines(True) if "offline" not in line))
    rows, missing = gpu.table_of_logs("tiny", logs, "vllm", False)
    assert rows == whole[:-1] and missing == ["offline"]


def test_logs_that_are_missing_or_damaged(fake_sides):
    logs = fake_sides / "logs"
    with pytest.raises(
        ValueError, match=r"tiny\.headrace\.log: cannot be read .*name the folder of the logs with --logs"
    ):
        gpu.table_of_logs("tiny", logs, "vllm", False)
    whole = gpu.compare_on_gpu(gpu.Setup("tiny"), logs, tell=lambda text: None)
    ours = logs / gpu.log_name("tiny", "headrace", False)
    text = ours.read_text()
    ours.write_text(text.rstrip()[:-20])  # cut off within the last row
    assert gpu.table_of_logs("tiny", logs, "vllm", False) == (whole[:-1], ["offline"])
    ours.write_text('{"case": 5}\n{"case": "offline", "value": null}\nnoise\n')
    with pytest.raises(ValueError, match=r"tiny\.headrace\.log: has no row of the start"):
        gpu.table_of_logs("tiny", logs, "vllm", False)


def test_a_side_without_its_engine_says_so(fake_sides):
    gpu.SCRIPT.write_text("import no_such_engine")
    with pytest.raises(ValueError, match=r"\(ModuleNotFoundError.*no_such_engine.*--peer-python names the Python"):
        gpu.compare_on_gpu(gpu.Setup("tiny"), fake_sides / "logs", tell=lambda text: None)
