"""The benchmark of embeddings runs, and finds that all ways give the same values."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import encoders

pytestmark = pytest.mark.slow  # a model of 33 million parameters


def test_the_engine_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["encoders", "--texts=2", "--rounds=1", f"--output={tmp_path / 'numbers'}"])
    encoders.main()
    assert "| engine |" in capsys.readouterr().out.replace("  ", "")
    results = json.loads((tmp_path / "numbers").read_text())
    assert results["texts"] == 2
    assert results["engine, torch's layers"]["difference"] < 1e-5
    assert results["engine"]["cpu_s"] > 0
