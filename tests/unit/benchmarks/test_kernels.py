"""The benchmark of kernels, on a tiny model."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import kernels as command
from tgi_server.engine.linear import choice


def test_linear_layers_and_attention_are_measured(tiny_model: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "_BUDGET_SECONDS", 0.0)
    monkeypatch.setattr(choice, "ROWS", (1, 4))
    monkeypatch.setattr(choice, "_WEIGHT_BYTES", 1 << 16)
    monkeypatch.setattr(sys, "argv", ["kernels", str(tiny_model), "--dtype", "float32", "--prompts", "40"])
    command.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"fma", "onednn"} <= set(result["linear"])
    assert all(seconds > 0 for by_rows in result["linear"].values() for seconds in by_rows.values())
    assert set(result["attention"]["40"]) == {"own", "torch", "torch, float32"}


def test_a_folder_without_a_model_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels", str(tmp_path)])
    with pytest.raises(SystemExit, match="no model in"):
        command.main()
