"""`LLM.profile` and `headrace profile` on a CPU: calls, steps, and nothing of the run changed."""

from headrace import LLM, SamplingParams
from headrace.cli.main import main
from headrace.ledger.jsonl import read_ledger
from tiny import write_tiny_llama


def test_a_block_of_a_running_engine(tmp_path):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(str(write_tiny_llama(tmp_path / "model")), device="cpu") as llm:
        (plain,) = llm.generate([[1, 2, 3]], params)
        with llm.profile(tmp_path / "profile") as lines:
            (profiled,) = llm.generate([[1, 2, 3]], params)
    assert profiled.outputs[0].token_ids == plain.outputs[0].token_ids
    assert any("ncalls" in line for line in lines)
    assert "execute" in (tmp_path / "profile" / "calls.txt").read_text()
    records = read_ledger(tmp_path / "profile" / "steps.jsonl").records
    assert sum(record.num_output_tokens for record in records) == 5, "the steps of the block only"


def test_the_command(tmp_path, capsys):
    model, folder = write_tiny_llama(tmp_path / "model"), tmp_path / "out"
    command = ["profile", "-m", str(model), "--device", "cpu", "-o", str(folder), "--output-len", "4"]
    assert main(command) == 0
    assert "headrace explain" in capsys.readouterr().out
    assert (folder / "steps.jsonl").exists()
    assert main([*command, "--batch-size", "0"]) == 2
    assert "--batch-size must be at least 1" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        # said before the model is looked for
        assert main(["profile", "-m", str(tmp_path / "no-model"), "-o", str(folder)]) == 2
        error = capsys.readouterr().err
        assert f"no profile can be written into {folder}: " in error and "name another folder" in error
