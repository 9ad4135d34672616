"""Weights that are rounded while they are read: what is lost, and models that go on saying sensible things."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import make, make_with_images
from tests.unit.engine.requests import generate_together, load_engine, prompts
from tgi_server.engine import EngineConfig
from tgi_server.engine.checkpoint.load_model import load_model
from tgi_server.engine.checkpoint.quantized import QuantizedLinear
from tgi_server.engine.checkpoint.quantized.rounding import ROUNDINGS, Rounding
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.runners import create_runner

TEXTS = prompts((1, 20, 5, 33))
LOST = {"int4": 0.1, "int8": 0.01, "eetq": 0.01, "bitsandbytes": 0.01, "fp8": 0.04, "bitsandbytes-fp4": 0.15}


def round_weights(file: Path, rounding: Rounding) -> None:
    tensors = load_file(file)
    linears = {name: rounding(tensor).dense() for name, tensor in tensors.items() if name.endswith("_proj.weight")}
    save_file(tensors | linears, file)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_rounding_loses_no_more_than_its_bits_must(name) -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 200)
    weight[3] = 0
    rounded = ROUNDINGS[name][1](weight).dense()
    assert float((rounded - weight).norm() / weight.norm()) < LOST.get(name, 0.12)
    assert not rounded[3].any()


@pytest.mark.parametrize(
    "name", [name if name == "int4" else pytest.param(name, marks=pytest.mark.slow) for name in ROUNDINGS]
)
def test_all_but_the_head_is_rounded_and_tokens_are_those_of_the_rounded_weights(name, tmp_path) -> None:
    folder, dense = (make("llama", tmp_path / part, num_hidden_layers=1) for part in ("plain", "dense"))
    model = load_model(EngineConfig(folder, dtype=torch.float32, quantize=name), torch.device("cpu"))
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 7
    assert type(model.lm_head) is torch.nn.Linear
    engine = load_engine(folder, quantize=name)
    assert engine.info.quantization == ROUNDINGS[name][0]
    tokens = generate_together(engine, TEXTS)
    assert all(len(each) == 12 for each in tokens)
    if name != "int8":  # which rounds activations, too
        round_weights(dense / "model.safetensors", ROUNDINGS[name][1])
        assert tokens == generate_together(load_engine(dense), TEXTS)


def test_rounded_weights_count_as_bytes_of_the_model(tmp_path) -> None:
    folder = make("llama", tmp_path)
    linears = [
        tensor for name, tensor in load_file(folder / "model.safetensors").items() if name.endswith("_proj.weight")
    ]
    configs = [EngineConfig(folder, dtype=torch.float32, quantize=name) for name in (None, "int4")]
    plain, rounded = (create_runner(load_model(config, torch.device("cpu")), config).weight_bytes for config in configs)
    saved = plain - rounded
    count = sum(tensor.numel() for tensor in linears)
    assert 3 * count < saved < 3.5 * count  # of 4 bytes each, half a byte and scales stay


@pytest.mark.parametrize("model_type", ["gemma3", "llama4", "mistral3", "qwen2_5_vl"])
def test_layers_that_have_other_names_in_the_files_are_rounded_as_well(model_type, tmp_path) -> None:
    folder = make_with_images(model_type, tmp_path)
    rounded = load_model(EngineConfig(folder, dtype=torch.float32, quantize="int4"), torch.device("cpu"))
    layers = [path for path, module in rounded.named_modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == 7 * rounded.config.get_text_config().num_hidden_layers
    file = folder / "model.safetensors"
    save_file({name: tensor.float() for name, tensor in load_file(file).items()}, file)
    round_weights(file, ROUNDINGS["int4"][1])
    dense = load_model(EngineConfig(folder, dtype=torch.float32), torch.device("cpu"))
    tokens = torch.tensor([[1, 20, 5, 33]])
    torch.testing.assert_close(rounded(tokens).logits, dense(tokens).logits)


def test_a_format_of_checkpoints_does_not_round(tmp_path) -> None:
    with pytest.raises(UnsupportedModel, match="--quantize gptq is for checkpoints that are quantised so"):
        load_engine(make("llama", tmp_path, num_hidden_layers=1), quantize="gptq")
