"""The benchmark of kernels, on a tiny model."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import kernels as command
from benchmarks import trials
from tgi_server.engine.linear import choice
from tgi_server.engine.linear.kernel_table import KernelTable


def test_linear_layers_and_attention_are_measured(tiny_model: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "_BUDGET_SECONDS", 0.0)
    monkeypatch.setattr(trials, "ROWS", (1, 4))
    monkeypatch.setattr(trials, "_WEIGHT_BYTES", 1 << 16)
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


@pytest.mark.slow
def test_a_section_of_the_table_is_measured_and_replaced(tiny_model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(command, "_BUDGET_SECONDS", 0.0)
    monkeypatch.setattr(trials, "_WEIGHT_BYTES", 1 << 16)
    file = tmp_path / "kernels.toml"
    file.write_text('# Head.\n\n[rules.dense]\nfloat32 = "fma"\n\n# old\n[avx2.dense]\nfloat32 = "fma"\n')
    monkeypatch.setattr(choice, "TABLE", file)
    monkeypatch.setattr(sys, "argv", ["kernels", str(tiny_model), "--write", "--rows", "1", "4"])
    for _ in range(2):
        command.main()
        isa = torch.ops.oatmill.isa()
        assert set(choice.tables()) == {"rules", "avx2", isa}
        assert file.read_text().startswith("# Head.")
        for weights in (each for kind in command.kinds_of_weights().values() for each in kind):
            text = choice.tables()[isa][weights.kind][str(weights.dtype).removeprefix("torch.")]
            assert command.equal_bits(weights, *KernelTable.of(text).kernels)


def test_only_kernels_of_equal_bits_share_a_table(monkeypatch) -> None:
    weights = choice.Weights.plain(torch.bfloat16)
    assert command.equal_bits(weights, "fma", "fma_dequant")
    if {"bf16", "amx"} <= set(weights.kernels):  # whose sums differ by less than bfloat16 shows
        assert not command.equal_bits(weights, "bf16", "amx")
    times = {"fma": {1: 1.0, 64: 4.0}, "fma_dequant": {1: 3.0, 64: 2.0}, "other": {1: 0.9, 64: 9.0}}
    same = {"fma", "fma_dequant"}
    monkeypatch.setattr(command, "equal_bits", lambda weights, *names: len(set(names)) == 1 or set(names) == same)
    assert str(command.best_table(weights, times)) == "fma,fma_dequant@64"
