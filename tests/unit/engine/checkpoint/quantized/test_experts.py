"""Mixtures of experts whose weights stay quantised: as small as their files, with the tokens of the dense weights."""

from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.quantized_models import make_quantized
from tests.tiny_models import make
from tests.unit.engine.requests import generate_together, load_engine, prompts
from tgi_server.engine import EngineConfig
from tgi_server.engine.backends.pack import has_small_layers
from tgi_server.engine.checkpoint.load_model import load_model
from tgi_server.engine.checkpoint.quantized import QuantizedLinear
from tgi_server.engine.checkpoint.quantized.rounding import ROUNDINGS

TEXTS = prompts((1, 20, 5, 33))
CPU = torch.device("cpu")


def load(folder: Path, quantize: str | None = None) -> PreTrainedModel:
    return load_model(EngineConfig(folder, dtype=torch.float32, quantize=quantize), CPU)


def dense_experts(model: PreTrainedModel) -> list[str]:
    """Returns the names of the weights that all experts of a layer have in one dense tensor."""
    return [name for name, parameter in model.named_parameters() if parameter.dim() == 3]


def round_experts(file: Path, name: str) -> None:
    """Writes what `--quantize name` makes of all linear layers but head and routers."""
    tensors = load_file(file)
    rounding = ROUNDINGS[name][1]
    rounded = {
        path: rounding(tensor).dense()
        for path, tensor in tensors.items()
        if path.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight"))
    }
    rounded |= {
        path: torch.stack([rounding(weight.T).dense().T for weight in tensor]).contiguous()
        for path, tensor in tensors.items()
        if tensor.dim() == 3
    }
    save_file(tensors | rounded, file)


@pytest.mark.parametrize(
    ("layout", "architecture"),
    [
        pytest.param("gptq_act_order", "mixtral", marks=pytest.mark.slow),
        ("awq", "qwen3_moe"),
        ("mxfp4", "gpt_oss"),
        pytest.param("nf4", "deepseek_v3", marks=pytest.mark.slow),
    ],
)
def test_experts_stay_quantised_and_say_what_dense_ones_do(layout, architecture, tmp_path) -> None:
    quantized, dense = make_quantized(layout, tmp_path, architecture)
    assert dense_experts(load(dense))
    assert not dense_experts(load(quantized))
    assert generate_together(load_engine(quantized), TEXTS) == generate_together(load_engine(dense), TEXTS)


def test_experts_stay_quantised_on_their_way_to_a_gpu(tmp_path) -> None:
    """The device that only knows shapes stands in for one."""
    quantized, _ = make_quantized("awq", tmp_path, "mixtral")
    model = load_model(EngineConfig(quantized, dtype=torch.bfloat16), torch.device("meta"))
    assert not dense_experts(model)
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert {layer.quantized.codes.device.type for layer in layers} == {"meta"}
    assert len(layers) > 4 * 3  # one for each projection of each expert


def test_experts_of_which_one_is_not_quantised_are_dense_and_right(tmp_path) -> None:
    quantized, dense = make_quantized("awq", tmp_path, "qwen3_moe", keep=("layers.0.mlp.experts.1.up_proj",))
    assert all(".layers.0." in name for name in dense_experts(load(quantized)))
    assert generate_together(load_engine(quantized), TEXTS) == generate_together(load_engine(dense), TEXTS)


@pytest.mark.parametrize("architecture", ["gpt_oss", "mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_experts_of_a_dense_checkpoint_are_rounded_while_it_is_loaded(architecture, tmp_path) -> None:
    folder = make(architecture, tmp_path)
    assert not dense_experts(load(folder, "int4"))
    found = generate_together(load_engine(folder, quantize="int4"), TEXTS)
    round_experts(folder / "model.safetensors", "int4")
    assert found == generate_together(load_engine(folder), TEXTS)


def test_without_kernels_plain_torch_computes_the_same(tmp_path) -> None:
    quantized, dense = make_quantized("mxfp4", tmp_path, "gpt_oss")
    found = generate_together(load_engine(quantized, custom_kernels=False), TEXTS)
    assert found == generate_together(load_engine(dense), TEXTS)


def test_a_token_gets_the_same_whatever_other_tokens_are_beside_it(tmp_path) -> None:
    quantized, _ = make_quantized("awq", tmp_path, "qwen3_moe")
    engine = load_engine(quantized)
    assert generate_together(engine, TEXTS) == [generate_together(engine, [text])[0] for text in TEXTS]


def test_a_mixture_of_small_experts_is_not_computed_in_one_thread(tmp_path, monkeypatch) -> None:
    quantized, _ = make_quantized("awq", tmp_path, "qwen3_moe")
    model = load(quantized)
    linears = [each for each in model.modules() if isinstance(each, torch.nn.Linear | QuantizedLinear)]
    of_all = sum(each.weight.nbytes if isinstance(each, torch.nn.Linear) else each.nbytes for each in linears)
    module = import_module("tgi_server.engine.backends.pack")
    monkeypatch.setattr(module, "SMALL_LAYER_BYTES", 1 + of_all // len(linears))
    assert not has_small_layers(model)
