"""Training of heads from end to end on a tiny model: what is trained is what the engine runs, and it learns."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headrace import LLM, SamplingParams  # noqa: E402
from headrace.cli.main import main  # noqa: E402
from headrace.config import ConfigError, EngineArgs  # noqa: E402
from headrace.loading.checkpoint import open_checkpoint  # noqa: E402
from headrace.train import heads, loop  # noqa: E402
from headrace.train.batches import Batches, frequent_tokens  # noqa: E402
from headrace.train.drafters import EagleDrafter, MedusaDrafter  # noqa: E402
from headrace.train.export import export  # noqa: E402
from headrace.train.heads import train_heads  # noqa: E402
from headrace.train.loop import evaluate  # noqa: E402
from headrace.train.prompts import read_prompts  # noqa: E402
from headrace.train.settings import TrainArgs  # noqa: E402
from headrace.train.target import Target  # noqa: E402
from headrace.train.texts import Text, alone_in  # noqa: E402
from tiny import write_tiny_llama  # noqa: E402

SETTINGS = TrainArgs(
    num_tokens=1500, max_tokens=40, epochs=2, draft_vocab=150, held_out=0.25, report_prompts=2, unroll=3,
    temperature=(0.0, 0.3), learning_rate=3e-3,
)  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_llama(tmp_path_factory.mktemp("train") / "model", layers=3))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text(
        "\n".join(f"say {word}" for word in ["one", "two", "three", "four", "five", "six", "seven", "eight"])
    )
    return str(path)


def engine_args(model):
    return EngineArgs.make(model=model, device="cpu", num_threads=1, max_num_seqs=16)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_from_prompts_to_an_engine_with_heads(model, prompts, tmp_path, kind):
    told = []
    out = tmp_path / "heads"
    facts = train_heads(engine_args(model), replace(SETTINGS, kind=kind), [prompts], out, told.append)
    first, last = (line for line in (told[3], told[-4]) if "loss" in line)
    assert float(last.split("loss ")[1].split(",")[0]) < float(first.split("loss ")[1].split(",")[0])
    assert facts["engine"]["0"]["tokens_a_step"] >= 1.0
    assert json.loads((out / "training.json").read_text())["best"]["expected"] >= 0
    with LLM(model) as plain, LLM(model, speculate=kind, draft_model=str(out), num_draft_tokens=3) as llm:
        (found,), (wanted,) = llm.generate("say one", GREEDY), plain.generate("say one", GREEDY)
        assert found.outputs == wanted.outputs
        assert llm.engine.ledger.totals.draft_tokens > 0
        assert not llm.engine.ledger.totals.proposers_dropped


def test_it_goes_on_where_it_was_interrupted(model, prompts, tmp_path, monkeypatch):
    out = tmp_path / "heads"
    settings = replace(SETTINGS, report_prompts=0)
    seen = []

    def interrupt(self, *_):
        seen.append(1)
        if len(seen) > 2:
            raise KeyboardInterrupt
        return original(self, *_)

    original = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train_heads(engine_args(model), settings, [prompts], out, lambda line: None)
    monkeypatch.setattr(torch.optim.AdamW, "step", original)
    shards = {path.name: path.stat().st_mtime_ns for path in (out / "training").glob("texts-*.npz")}
    told = []
    facts = train_heads(engine_args(model), settings, [prompts], out, told.append)
    assert not any("at the start" in line for line in told)
    steps = [each["steps"] for each in facts["history"]]
    assert steps == sorted(set(steps)) and facts["steps"] == steps[-1] > 2
    assert {path.name: path.stat().st_mtime_ns for path in (out / "training").glob("texts-*.npz")} == shards
    with pytest.raises(ConfigError, match="another max_tokens"):
        train_heads(engine_args(model), replace(settings, max_tokens=41), [prompts], out, lambda line: None)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_the_engine_drafts_what_the_trained_module_says(model, tmp_path, kind):
    """The module's chain, made from the true tokens, against the engine's drafts wherever those were right so far."""
    checkpoint = open_checkpoint(model)
    rng = np.random.default_rng(1)
    ids = np.sort(rng.permutation(256)[:120])
    torch.manual_seed(1)
    output = torch.randn(120, 48) * 0.3
    make = EagleDrafter if kind == "eagle" else MedusaDrafter
    drafter = make(checkpoint.spec, 3, output, *([64] if kind == "eagle" else []))
    for parameter in drafter.parameters():
        parameter.data = (parameter.data + torch.randn_like(parameter) * 0.1).bfloat16().float()
    export(drafter, tmp_path / "heads", checkpoint.spec, ids, {})
    prompt = list(range(40, 60))
    with LLM(
        model, speculate=kind, draft_model=str(tmp_path / "heads"), num_draft_tokens=3, mode="exact", device="cpu"
    ) as llm:
        (proposer,) = llm.engine._worker.proposer._proposers.values()
        propose, drafted = proposer.propose, {}

        def watch(context):
            found = propose(context)
            if found is not None:
                known = int(context.num_tokens[context.rows[0]])
                drafted[known] = [token for token in found.tokens[0].tolist() if token >= 0]
            return found

        proposer.propose = watch
        (answer,) = llm.generate([prompt], GREEDY)
    tokens = np.array([*prompt, *answer.outputs[0].token_ids], np.int32)
    target = Target(checkpoint, torch.device("cpu"), torch.float32, 128)
    batches = Batches(target, [Text(tokens, len(prompt), 0)], ids, 1000, 0.0)
    (batch,) = batches.one_pass()
    with torch.no_grad():
        guesses = [
            ids[drafter.score(step, hidden[0]).argmax(-1).numpy()]
            for step, hidden in enumerate(drafter.steps(batch.embedded, batch.features))
        ]
    compared = 0
    for known, drafts in drafted.items():
        for step, token in enumerate(drafts):
            if known + step > len(tokens) - 1 or drafts[:step] != tokens[known : known + step].tolist():
                break  # the module is given the text's tokens, the engine goes on from its own
            assert token == guesses[step][known - 2]
            compared += 1
    assert compared >= 15


def test_chains_of_a_step_are_those_of_a_head_run_again(model):
    """The unrolled steps against the layer run over each chain's entries from the beginning."""
    spec = open_checkpoint(model).spec
    torch.manual_seed(0)
    drafter = EagleDrafter(spec, 3, torch.randn(50, 48), 64)
    for parameter in drafter.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    embedded, features = torch.randn(1, 12, 48), torch.randn(1, 12, 48)
    with torch.no_grad():
        unrolled = list(drafter.steps(embedded, features))
        for root in range(8):
            entries = features[:, : root + 1]
            for step in range(3):
                out = drafter.midlayer(embedded[:, 1 : root + 2 + step], entries, 0, [])
                assert torch.allclose(drafter.norm(out)[0, -1], unrolled[step][0, root], atol=1e-4)
                entries = torch.cat([entries, out[:, -1:]], 1)


def test_a_perfect_head_is_measured_as_such(model):
    checkpoint = open_checkpoint(model)
    target = Target(checkpoint, torch.device("cpu"), torch.float32, 64)
    text = Text(np.arange(20, 50, dtype=np.int32), 5, 0)
    ids = np.arange(checkpoint.spec.vocab_size)
    batches = Batches(target, [text], ids, 100, 1e6)

    class Oracle(MedusaDrafter):
        """Says at step 0 what the model itself will say behind the next token."""

        def steps(self, embedded, features):
            yield features[:, 1:]

        def score(self, step, hidden):
            return target._logits(hidden)

    oracle = Oracle(checkpoint.spec, 1, torch.zeros(len(ids), 48))
    found = evaluate(oracle, batches)
    assert found.greedy == [1.0] and found.shared[0] == pytest.approx(1.0, abs=1e-5) and found.expected == 1.0
    assert evaluate(oracle, batches).loss == pytest.approx(found.loss, rel=1e-2)  # now from kept features


def test_frequent_tokens_are_those_that_the_model_wrote():
    texts = [Text(np.array([7, 7, 7, 1, 2, 2], np.int32), 3, 0), Text(np.array([9, 2, 3], np.int32), 1, 1)]
    ids, covered = frequent_tokens(texts, 2, 12)
    assert ids.tolist() == [1, 2] and covered == pytest.approx(4 / 5)


def test_prompts_are_read_from_files_and_folders(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n two \none\n")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        chat = [{"role": "user", "content": "hi"}]
        file.write(json.dumps({"prompt": "def f", "raw": True}) + "\n" + json.dumps({"prompt": chat}) + "\n")
    (tmp_path / "ignored.md").write_text("no prompt")
    found = [(prompt.content, prompt.raw) for prompt in read_prompts([tmp_path])]
    assert found == [("one", False), ("two", False), ("def f", True), (chat, False)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "x", "prompts are read from .txt and .jsonl files"),
        ("a.jsonl", "{", "a.jsonl, line 1: is not JSON"),
        ("a.jsonl", '{"text": "x"}', "has no field 'prompt'; name another with --field"),
        ("a.jsonl", '{"prompt": 3}', "must be a text or a list of messages"),
        ("a.jsonl", '{"prompt": "x", "raw": 1}', "raw must be true or false"),
        ("a.txt.gz", "not gzip", "cannot be read"),
        ("a.txt", "", "no prompts in"),
    ],
)
def test_bad_prompts_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts([tmp_path / name])


def test_bad_commands_end_with_one_line(model, prompts, tmp_path, capsys):
    out = str(tmp_path / "out")
    for extra, message in (
        (["--minutes", "0"], "minutes must be above 0"),
        (["--held-out", "0.9"], "held_out must be above 0 and at most 0.5"),
        (["--temperature", "11"], "temperature must be from 0 to 10"),
        (["--max-tokens", "600"], "every prompt is longer than"),
    ):
        assert main(["train-heads", prompts, "-o", out, "-m", model, "--device", "cpu", *extra]) == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert message in error[-1], error


def test_one_process_at_a_time_in_a_folder(model, prompts, tmp_path):
    out = tmp_path / "out"
    with alone_in(out / "training"), pytest.raises(ConfigError, match=r"another process trains in .*; wait for it"):
        train_heads(engine_args(model), SETTINGS, [prompts], out, lambda line: None)
    with alone_in(out / "training"):
        pass  # it was let go of


def test_folders_that_cannot_be_written_are_refused_first(model, prompts, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"no heads can be written into .*file: .*; give another --output"):
        train_heads(engine_args(model), SETTINGS, [prompts], tmp_path / "file")
    settings = replace(SETTINGS, work=str(tmp_path / "file" / "work"))
    with pytest.raises(ConfigError, match=r"nothing can be written into .*work: .*; give another folder"):
        train_heads(engine_args(model), settings, [prompts], tmp_path / "out")


def test_damaged_state_is_named(model, prompts, tmp_path):
    out, work = tmp_path / "out", tmp_path / "out" / "training"
    train_heads(engine_args(model), replace(SETTINGS, epochs=0.2), [prompts], out, lambda line: None)
    names = {path.name: path for path in work.iterdir()}
    assert {"texts.json", "eagle.state"} <= names.keys() and any(name.endswith(".npz") for name in names)
    for name, path in names.items():
        if name == "lock":
            continue
        whole = path.read_bytes()
        for size in (0, 1, len(whole) // 2):
            path.write_bytes(whole[:size])
            with pytest.raises(ConfigError, match=rf"{name}.*delete"):
                train_heads(engine_args(model), replace(SETTINGS, epochs=4), [prompts], out, lambda line: None)
        path.write_bytes(whole)


def test_a_state_that_cannot_be_written(tmp_path, monkeypatch):
    def full(state, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    module = torch.nn.Linear(2, 2)
    with pytest.raises(OSError, match=r"eagle\.state cannot be written \(No space left on device\); make room"):
        loop._save(tmp_path / "eagle.state", module, torch.optim.AdamW(module.parameters()), loop.Progress())
    assert not list(tmp_path.iterdir())


def test_a_folder_with_heads_of_the_other_kind_is_refused(model, prompts, tmp_path):
    """An engine would take the Medusa heads of a folder that has both."""
    for kind, name in (("eagle", "medusa_lm_head.safetensors"), ("medusa", "model.safetensors")):
        out = tmp_path / kind
        out.mkdir()
        (out / name).write_bytes(b"")
        with pytest.raises(ConfigError, match=rf"{kind} holds {name} of --kind .*give another --output"):
            train_heads(engine_args(model), replace(SETTINGS, kind=kind), [prompts], out, lambda line: None)


def test_a_full_disk_ends_with_one_line(model, prompts, tmp_path, capsys, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(heads, "train_heads", full)
    assert main(["train-heads", prompts, "-o", str(tmp_path / "out"), "-m", model]) == 2
    assert f"the disk of {tmp_path / 'out'} is full; make room, and the same command goes on" in capsys.readouterr().err
