from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks import trained
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
