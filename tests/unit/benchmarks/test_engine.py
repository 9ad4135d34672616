"""The engine's own benchmark, on a tiny model."""

import json
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from benchmarks import engine as command
from benchmarks.bench import ADAPTERS, EXTRAS, Bench
from benchmarks.floor import Machine
from benchmarks.machine import cost_of, read_config
from benchmarks.synthetic import SyntheticModel, write_adapters
from tests.tiny_models import make
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.engine import Engine

CPU = torch.device("cpu")
MACHINE = Machine(bandwidth=1e9, matrix_rate=1e12)


def test_the_cost_of_a_model_is_that_of_its_layers_and_its_cache(tiny_model: Path) -> None:
    cost = cost_of(read_config(tiny_model), torch.bfloat16)
    weights = 2 * (128 * 64 + 64 * 64 + 192 * 64 + 64 * 96)
    assert (cost.weight_bytes, cost.layer_flops, cost.head_flops) == (2 * (weights + 65536), 2 * weights, 2 * 65536)
    assert (cost.kv_bytes, cost.attention_flops) == (2 * 2 * 2 * 16 * 2, 4 * 2 * 4 * 16)


def test_the_cost_of_a_mixture_is_that_of_the_experts_of_one_token(tmp_path: Path) -> None:
    cost = cost_of(read_config(make("mixtral", tmp_path)), torch.float32)
    attention, experts = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64), 2 * 2 * 3 * 64 * 96  # two of four in two layers
    assert cost.layer_flops == 2 * (attention + experts)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model in"):
        read_config(tmp_path)


@torch.inference_mode()
@pytest.mark.parametrize("prefill_tokens", [None, 32])
def test_prefill_and_decode_are_measured_beside_the_floor(tiny_model: Path, prefill_tokens: int | None) -> None:
    engine = Engine(EngineConfig(tiny_model, dtype=torch.float32, device=CPU, cpu_memory=1 << 26))
    bench = Bench(engine, context=16, steps=4, max_batch_size=5, prefill_tokens=prefill_tokens)
    cost = cost_of(read_config(tiny_model), torch.float32)
    for batch in (5, 1):
        prefill, decode = command.measure(bench, cost, MACHINE, batch, 16, time.perf_counter)
        assert (prefill.step, prefill.batch, prefill.tokens) == ("prefill", batch, 16 * batch)
        assert (decode.step, decode.batch, decode.tokens) == ("decode", batch, batch)
        assert min(prefill.engine, decode.engine) > 0
        assert decode.floor == pytest.approx((cost.weight_bytes + 16 * batch * cost.kv_bytes) / 1e9)
        assert len(prefill.row()) == 7


def test_a_model_of_a_shape_is_made_on_the_device(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = SyntheticModel(AutoConfig.from_pretrained(tiny_model), ("<unk>", "<s>", "</s>"))
    monkeypatch.setattr(command, "MODELS", {"tiny": shape})
    monkeypatch.setattr(command, "measure_machine", lambda *_: MACHINE)
    output = tmp_path / "steps.json"
    flags = ["--batch", "2", "--context", "8", "--steps", "2", "--dtype", "float32", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["engine", "tiny", *flags])
    command.main()
    assert [each["step"] for each in json.loads(output.read_text())["steps"]] == ["prefill", "decode"]
    assert "tiny, prompts of 8 tokens, float32 on" in capsys.readouterr().out


def test_steps_whose_rows_have_adapters_or_grammars_are_measured_beside_plain_ones(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "tiny")
    write_adapters(SyntheticModel(AutoConfig.from_pretrained(folder), ()), tmp_path / "tiny-adapters", ADAPTERS, rank=2)
    monkeypatch.setattr(command, "measure_machine", lambda *_: MACHINE)
    output = tmp_path / "steps.json"
    flags = ["--batch", "2", "--context", "8", "--steps", "2", "--rounds", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["engine", str(folder), "--extras", *EXTRAS, *flags])
    command.main()
    measured = json.loads(output.read_text())["extras"]
    assert [each["extra"] for each in measured] == list(EXTRAS)
    assert all(each["without"][0] > 0 and each["having"][0] > 0 for each in measured)
