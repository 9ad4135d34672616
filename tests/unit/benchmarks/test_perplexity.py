"""Perplexities of a model's variants, compared with its weights in float32."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import perplexity as command
from tests.gguf_models import make_wide
from tgi_server import demo_model


def test_the_table_compares_variants_with_float32(tmp_path: Path, monkeypatch, capsys) -> None:
    arguments = ["--table", "--tokens", "1024", "--work", str(tmp_path), "--only", "as it is, float32", "bfloat16"]
    monkeypatch.setattr(sys, "argv", ["perplexity", str(demo_model.PATH), *arguments])
    command.main()
    *lines, results = capsys.readouterr().out.splitlines()
    found = json.loads(results)
    assert list(found) == ["float32", "as it is, float32", "bfloat16"]
    assert found["float32"] == pytest.approx(found["as it is, float32"], rel=1e-6)
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=0.1)
    assert "+0.00%" in lines[2]


def test_a_dense_copy_has_the_numbers_of_a_gguf_file(tmp_path: Path) -> None:
    file, dense = make_wide("qwen2", tmp_path / "model", "Q4_K")
    copy = command.dense_copy(command.model_folder(file), tmp_path / "copy")
    tensors = command.load_model(command.EngineConfig(copy), command.torch.device("cpu")).state_dict()
    expected = command.load_model(command.EngineConfig(dense), command.torch.device("cpu")).state_dict()
    assert all(command.torch.equal(tensors[name], tensor) for name, tensor in expected.items())
