"""Readers against the libraries that write these formats, where they are installed.

transformers reads FP8 and MXFP4 by itself. bitsandbytes, compressed-tensors, and optimum with gptqmodel install beside
it; keep them in an environment of their own.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config

from tests.quantized_models import make_quantized, set_config
from tests.tiny_models import make
from tests.unit.engine.requests import load_engine
from tests.unit.model_files.test_gptq_quantizer import samples
from tgi_server.engine import EngineConfig
from tgi_server.engine.checkpoint.load_model import load_model
from tgi_server.engine.checkpoint.quantized import find_quantization
from tgi_server.engine.checkpoint.reader import open_checkpoint
from tgi_server.model_files.gptq_quantizer import quantize_folder
from tgi_server.model_files.gptq_rounding import GptqSettings

pytestmark = pytest.mark.slow
TOKENS = torch.arange(3, 40).unsqueeze(0)


def own_logits(folder: Path) -> Tensor:
    model = load_model(EngineConfig(folder, dtype=torch.float32, custom_kernels=False), torch.device("cpu"))
    with torch.inference_mode():
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize(
    ("layout", "architecture", "settings"),
    [
        ("fp8_blocks", "llama", FineGrainedFP8Config(dequantize=True)),
        ("mxfp4", "gpt_oss", Mxfp4Config(dequantize=True)),
        *((layout, "llama", None) for layout in ("w8a8", "fp8_rows", "w4a16", "w4a16_asymmetric", "w8a16")),
    ],
)
def test_transformers_reads_the_same_weights(layout, architecture, settings, tmp_path) -> None:
    if settings is None:
        pytest.importorskip("compressed_tensors")
        settings = CompressedTensorsConfig(dequantize=True)
    folder, _ = make_quantized(layout, tmp_path, architecture)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=settings)
    with torch.inference_mode():
        expected = model.float()(input_ids=TOKENS).logits
    # what is not in float32 on its way is rounded to 16 bits
    assert float((own_logits(folder) - expected).norm() / expected.norm()) < 0.015


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_reads_the_same_weights(kind, double, tmp_path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(96, 320, generator=torch.Generator().manual_seed(0))
    codes, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=double)
    expected = functional.dequantize_4bit(codes, state)
    folder = make("llama", tmp_path, num_hidden_layers=1)
    tensors = {f"x.weight.{name}": each.contiguous() for name, each in state.as_dict(packed=True).items()}
    save_file(tensors | {"x.weight": codes}, folder / "model.safetensors")
    set_config(folder, quantization_config={"quant_method": "bitsandbytes", "bnb_4bit_quant_type": kind})
    found = find_quantization(folder, AutoConfig.from_pretrained(folder), None)
    with open_checkpoint(folder, quantization=found) as opened:
        torch.testing.assert_close(opened["x.weight"][...], expected.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", GptqSettings(group_size=32)),
        ("llama", GptqSettings(group_size=32, act_order=True)),
        ("llama", GptqSettings(8, -1)),
        ("opt", GptqSettings(group_size=32)),
        ("gpt_neox", GptqSettings(8, 32)),
        ("mixtral", GptqSettings(group_size=32)),
    ],
)
def test_transformers_loads_what_quantize_wrote(architecture, settings, tmp_path) -> None:
    pytest.importorskip("optimum")
    linears = pytest.importorskip("gptqmodel.nn_modules.qlinear")
    quantize_folder(make(architecture, tmp_path / "source"), tmp_path / "target", samples(), settings)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    assert any(isinstance(module, linears.BaseQuantLinear) for module in model.modules())
    with torch.inference_mode():
        expected = model(input_ids=TOKENS).logits
    # gptqmodel rounds weights to float16
    assert float((own_logits(tmp_path / "target") - expected).norm() / expected.norm()) < 0.002


def test_bitsandbytes_rounds_to_the_same_codebooks(tmp_path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    from tgi_server.engine.checkpoint.quantized.rounding import ROUNDINGS

    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    for kind in ("nf4", "fp4"):
        expected = functional.dequantize_4bit(*functional.quantize_4bit(weight, quant_type=kind))
        rounded = ROUNDINGS[f"bitsandbytes-{kind}"][1](weight).dense()
        assert float((rounded - expected).norm() / expected.norm()) < 0.01


def test_a_folder_that_bitsandbytes_wrote_is_served(tmp_path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    source = make("llama", tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=settings, device_map="cpu")
    model.save_pretrained(tmp_path / "target")
    assert json.loads((tmp_path / "target" / "config.json").read_text())["quantization_config"]
    assert load_engine(tmp_path / "target").info.quantization == "bitsandbytes, nf4, double quantised"
