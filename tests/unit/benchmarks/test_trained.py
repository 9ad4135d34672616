import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks import machine, trained
from tests.gguf_models import make_wide
from tests.unit.engine.requests import load_engine


@pytest.mark.slow
def test_what_is_trained_can_be_served_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--hidden=64", "--layers=1", "--vocabulary=260", "--steps=2", "--batch=1"]
    monkeypatch.setattr("sys.argv", ["trained", f"--folder={tmp_path}", *sizes])
    monkeypatch.setattr(trained, "sources", lambda: (["import this\n" * 200], ["import that\n" * 20]))
    trained.main()
    assert (
        load_engine(tmp_path).info.vocab_size == Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size()
    )
    assert (tmp_path / "held_out.txt").read_text().startswith("import that")
    assert (tmp_path / "calibration.txt").read_text().startswith("import this")


@pytest.fixture
def gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A file with quantized weights, and a folder with its numbers."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return make_wide("llama", tmp_path, "Q8_0")


def test_a_gguf_file_becomes_a_folder_with_its_numbers(gguf_file: tuple[Path, Path], tmp_path: Path) -> None:
    file, dense = gguf_file
    folder = tmp_path / "converted"
    trained.convert(file, folder)
    numbers, expected = (AutoModelForCausalLM.from_pretrained(each, dtype="bfloat16") for each in (folder, dense))
    for (name, one), two in zip(numbers.named_parameters(), expected.parameters(), strict=True):
        assert one.allclose(two), name
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()


def test_the_cost_of_a_gguf_file_is_that_of_its_own_weights(gguf_file, monkeypatch, capsys) -> None:
    file, _ = gguf_file
    monkeypatch.setattr(machine, "measure_machine", lambda *_: machine.Machine(1.0, 1.0))
    monkeypatch.setattr("sys.argv", ["machine", "--model", str(file)])
    machine.main()
    assert json.loads(capsys.readouterr().out)["cost"]["weight_bytes"] == file.stat().st_size
