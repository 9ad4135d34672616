"""The roofline of a tiny model: parts of steps beside their floors."""

import shutil
from pathlib import Path

import pytest
import torch

from benchmarks import peaks, roofline
from benchmarks.peaks import Peak, Peaks
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.engine import Engine
from tgi_server.engine.kernels import load_kernels

pytestmark = pytest.mark.skipif(not load_kernels(), reason="the kernels cannot be compiled here")
PEAKS = Peaks({"vfmadd231ps": Peak(1e9, 2e9)}, {"memory": Peak(1e9, 2e9)}, 2)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_caches_are_read_faster_than_memory_and_every_instruction_multiplies(monkeypatch) -> None:
    monkeypatch.setattr(peaks, "_SECONDS", 0.01)
    monkeypatch.setattr(peaks, "_MEMORY_BYTES", 1 << 22)
    found = peaks.measure_peaks(1)
    assert all(min(each.one, each.all) > 0 for each in (*found.instructions.values(), *found.reading.values()))
    assert "memory" in found.reading
    assert found.of_kernel("fma") is not None
    assert "| memory |" not in (table := roofline.peak_table(found))
    assert "reading, memory" in table


def test_the_peak_of_a_kernel_is_that_of_its_instruction() -> None:
    assert PEAKS.of_kernel("fma_dequant") == Peak(1e9, 2e9)
    assert PEAKS.of_kernel("bf16") is None
    assert PEAKS.of_kernel("") is None


@torch.inference_mode()
def test_parts_of_steps_add_up_to_the_step(tiny_model: Path, monkeypatch) -> None:
    engine = Engine(EngineConfig(tiny_model, dtype=torch.float32, device=torch.device("cpu"), cpu_memory=1 << 26))
    model = engine._runner.model
    measured = roofline.Roofline(engine, model, PEAKS, prompt=16, most_rows=3)
    for parts in (measured.prefill(), measured.decode(3)):
        by_name = {part.name: part for part in parts}
        assert {"qkv", "output", "up", "down", "head", "attention", "norms", "step"} <= set(by_name)
        assert by_name["qkv"].calls == 2
        assert by_name["qkv"].floor is not None
        inside = sum(part.seconds for part in parts if part.name not in ("step", "waiting for threads"))
        assert inside == pytest.approx(by_name["step"].seconds)
        assert len(by_name["norms"].row(1.0)) == 6
    assert torch.ops.oatmill.measure_parts(False) == {}


def test_the_floor_of_a_linear_layer_is_memory_or_arithmetic(tiny_model: Path) -> None:
    engine = Engine(EngineConfig(tiny_model, dtype=torch.float32, device=torch.device("cpu"), cpu_memory=1 << 26))
    layer = roofline.linear_layers(engine._runner.model.decoder)["up"][0]
    inputs, outputs = layer.in_features, layer.out_features
    assert roofline.weight_bytes(layer, 1) == inputs * outputs * 4
    assert roofline.linear_floor(layer, 1, PEAKS) == inputs * outputs * 4 / 2e9
    assert roofline.linear_floor(layer, 64, PEAKS) == 2 * 64 * inputs * outputs / 2e9
    table = roofline.Roofline(engine, engine._runner.model, PEAKS, 16, 1).layers([1, 4], torch.float32)
    assert [line[:4] for line in table[:2]] == [["qkv", "64x128", "fma", rows] for rows in "14"]
