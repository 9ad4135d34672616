"""The engine's own benchmark, on a tiny model."""

from pathlib import Path

import pytest
import torch

from benchmarks.bench import Bench
from benchmarks.engine import measure, measure_grammars
from benchmarks.floor import Machine
from benchmarks.linears import BareLinears, linear_shapes
from benchmarks.shards import COLUMNS, Job, measure_shards
from tgi_server import demo_model
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.engine import Engine


def test_shapes_are_those_of_the_model_with_layers_of_one_input_joined(tiny_model: Path) -> None:
    shapes = linear_shapes(tiny_model)
    qkv, output, gate_up, down = (64 + 32 + 32, 64), (64, 64), (2 * 96, 64), (64, 96)
    assert shapes.layers == [qkv, output, gate_up, down] * 2
    assert shapes.head == (1024, 64)
    weights = 2 * (128 * 64 + 64 * 64 + 192 * 64 + 64 * 96)
    cost = shapes.cost(torch.bfloat16)
    assert (cost.weight_bytes, cost.layer_flops, cost.head_flops) == (2 * (weights + 65536), 2 * weights, 2 * 65536)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model in"):
        linear_shapes(tmp_path)


@torch.inference_mode()
def test_prefill_and_decode_are_measured_beside_linears_and_floor(tiny_model: Path) -> None:
    engine = Engine(EngineConfig(tiny_model, dtype=torch.bfloat16, device=torch.device("cpu"), cpu_memory=1 << 26))
    bench = Bench(engine, context=16, steps=4, max_batch_size=4)
    shapes = linear_shapes(tiny_model)
    linears = BareLinears(shapes, torch.device("cpu"), torch.bfloat16)
    cost = shapes.cost(torch.bfloat16)
    for batch in (4, 1):
        prefill, decode = measure(bench, linears, cost, Machine(1e9, 1e12), batch, 16 * batch)
        assert (prefill.step, prefill.batch, prefill.tokens) == ("prefill", batch, 16 * batch)
        assert (decode.step, decode.batch, decode.tokens) == ("decode", batch, batch)
        assert min(prefill.engine, prefill.linears, decode.engine, decode.linears) > 0
        assert decode.floor == pytest.approx(cost.weight_bytes / 1e9)
        assert len(prefill.row()) == 9


@torch.inference_mode()
def test_decoding_with_grammars_is_measured() -> None:
    engine = Engine(EngineConfig(demo_model.PATH, dtype=torch.bfloat16, device=torch.device("cpu"), cpu_memory=1 << 26))
    measurement = measure_grammars(Bench(engine, context=16, steps=4, max_batch_size=4), 3)
    assert measurement.batch == 3
    assert min(measurement.nobody, measurement.one, measurement.everybody) > 0
    assert len(measurement.row()) == 6


@pytest.mark.slow
def test_the_same_steps_are_measured_on_two_shards(tiny_model: Path) -> None:
    config = EngineConfig(tiny_model, dtype=torch.float32, device=torch.device("cpu"))
    prefill, decode = measure_shards(Job(config, [2], context=16, steps=4, threads=1), 2)
    assert (prefill.step, prefill.batch, prefill.tokens) == ("prefill", 2, 32)
    assert (decode.step, decode.batch, decode.tokens) == ("decode", 2, 2)
    for each in (prefill, decode):
        assert each.calls == 1 + 2 * 2 + 1  # embeddings, two in each of two layers, logits
        assert 0 < each.collectives < each.engine * 10
    assert len(decode.row(alone=0.001)) == len(COLUMNS)
