"""GPTQ of a whole folder: smaller errors than rounding, a run that goes on where it stopped, and refusals."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.quantized_models import make_quantized
from tests.tiny_models import VOCAB_SIZE, make
from tgi_server.engine import EngineConfig
from tgi_server.engine.checkpoint.load_model import load_model
from tgi_server.engine.checkpoint.quantized import QuantizedLinear
from tgi_server.engine.checkpoint.quantized.rounding import ROUNDINGS
from tgi_server.engine.errors import ModelNotFound, UnsupportedModel
from tgi_server.model_files import gptq_quantizer as quantizer
from tgi_server.model_files.gptq_quantizer import quantize_folder
from tgi_server.model_files.gptq_rounding import GptqSettings, Hessian, round_weight

SETTINGS = GptqSettings(group_size=32)
CPU = torch.device("cpu")


def samples(count: int = 24, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (32,), generator=generator) for _ in range(count)]


def logits(folder: Path, **settings) -> Tensor:
    model = load_model(EngineConfig(folder, dtype=torch.float32, custom_kernels=False, **settings), CPU)
    with torch.inference_mode():
        return torch.cat([model(input_ids=text.unsqueeze(0)).logits[0] for text in samples(8, seed=1)])


@pytest.mark.parametrize("settings", [SETTINGS, GptqSettings(8, -1), GptqSettings(group_size=32, act_order=True)])
def test_a_weight_loses_less_of_its_outputs_than_by_rounding(settings) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(40, 200), torch.randn(500, 200) @ torch.randn(200, 200)
    hessian = Hessian(200, CPU)
    hessian.add(x)
    error = (x @ (round_weight(weight, hessian.mean(), settings).dense() - weight).T).norm()
    rounded = ROUNDINGS["int4" if settings.bits == 4 else "int8"][1](weight).dense()
    assert error < 0.8 * (x @ (rounded - weight).T).norm()


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", GptqSettings(group_size=32, act_order=True)),
        pytest.param("opt", GptqSettings(8, -1), marks=pytest.mark.slow),
        pytest.param("gemma3_text", SETTINGS, marks=pytest.mark.slow),
        pytest.param("gpt_neox", SETTINGS, marks=pytest.mark.slow),
    ],
)
def test_what_is_written_is_read_and_near_to_the_model(architecture, settings, tmp_path) -> None:
    source, target = make(architecture, tmp_path / "source"), tmp_path / "target"
    quantize_folder(source, target, samples(), settings)
    model = load_model(EngineConfig(target, custom_kernels=False), CPU)
    assert any(isinstance(module, QuantizedLinear) for module in model.modules())
    expected = logits(source)
    worse = cross_entropy(logits(source, quantize="int4"), expected.softmax(-1))
    assert cross_entropy(logits(target), expected.softmax(-1)) < worse


@pytest.mark.slow
def test_an_interrupted_run_goes_on_where_it_was(tmp_path, monkeypatch) -> None:
    source, whole, target = make("llama", tmp_path / "source"), tmp_path / "whole", tmp_path / "target"
    quantize_folder(source, whole, samples(), SETTINGS)
    quantized = []
    write = quantizer._quantized_layer

    def interrupted(*arguments):
        if quantized:
            raise KeyboardInterrupt
        quantized.append(arguments)
        return write(*arguments)

    monkeypatch.setattr(quantizer, "_quantized_layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_folder(source, target, samples(), SETTINGS)
    assert not target.exists()
    with pytest.raises(UnsupportedModel, match="has layers of a run with other settings; remove it"):
        quantize_folder(source, target, samples(), GptqSettings(group_size=64))
    with pytest.raises(UnsupportedModel, match="has layers of a run with another calibration text"):
        quantize_folder(source, target, samples(seed=1), SETTINGS)
    with pytest.raises(UnsupportedModel, match="has layers of a run with another model"):
        quantize_folder(make("llama", tmp_path / "other"), target, samples(), SETTINGS)
    quantized.clear()
    quantize_folder(source, target, samples(), SETTINGS)
    assert len(quantized) == 1
    assert torch.equal(logits(target), logits(whole))
    assert json.loads((target / "config.json").read_text())["quantization_config"]["bits"] == 4


def test_what_cannot_be_quantised_says_so(tmp_path) -> None:
    source = make("llama", tmp_path / "source", num_hidden_layers=1)
    with pytest.raises(UnsupportedModel, match="is not empty; give a folder that does not exist yet"):
        quantize_folder(source, source, samples(), SETTINGS)
    with pytest.raises(UnsupportedModel, match="is quantized already; use the model from before"):
        quantize_folder(make_quantized("gptq", tmp_path)[0], tmp_path / "target", samples(), SETTINGS)
    with pytest.raises(UnsupportedModel, match="gpt2 models cannot be quantized"):
        quantize_folder(make("gpt2", tmp_path / "gpt2"), tmp_path / "target", samples(), SETTINGS)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"has only \.bin weights"):
        quantize_folder(source, tmp_path / "target", samples(), SETTINGS)


@pytest.mark.timeout(60)
def test_a_model_whose_numbers_overflow_is_refused(tmp_path) -> None:
    source = make("llama", tmp_path / "source", num_hidden_layers=1)
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = float("inf")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"inputs of self_attn\.q_proj that are infinite or no numbers"):
        quantize_folder(source, tmp_path / "target", samples(), SETTINGS)


@pytest.mark.slow
def test_transformers_reads_what_is_written(tmp_path) -> None:
    pytest.importorskip("gptqmodel", reason="transformers reads GPTQ with gptqmodel, in an environment of its own")
    source, target = make("llama", tmp_path / "source"), tmp_path / "target"
    quantize_folder(source, target, samples(), SETTINGS)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        other = torch.cat([model(input_ids=text.unsqueeze(0)).logits[0] for text in samples(8, seed=1)])
    torch.testing.assert_close(other, logits(target), rtol=1e-2, atol=1e-2)
