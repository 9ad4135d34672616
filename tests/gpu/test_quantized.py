"""Quantised models on a GPU: the kernels that serve them, and the tokens of the same weights made dense."""

import pytest
import torch

from tests.gpu.marks import NEEDS_GPU
from tests.quantized_models import make_quantized
from tests.unit.engine.requests import generate_together, load_engine, prompts
from tgi_server.engine.checkpoint.quantized import QuantizedLinear
from tgi_server.engine.checkpoint.quantized.rounding import ROUNDINGS
from tgi_server.engine.linear.gpu import TRITON, fault_of
from tgi_server.engine.linear.kernel_table import SCALED_MM

pytestmark = NEEDS_GPU

CUDA = torch.device("cuda")
TEXTS = prompts((1, 20, 5, 33))


@pytest.mark.parametrize(
    ("layout", "architecture", "kind"),
    [
        ("gptq_act_order", "llama", "int4"),
        ("gptq_one_group", "opt", "int4"),
        ("awq", "qwen2", "int4"),
        ("nf4", "llama", "codebook"),
        ("w8a8", "qwen3", "int8"),
        ("fp8_blocks", "qwen3_moe", "fp8"),
        ("gptq", "mixtral", "int4"),
        ("mxfp4", "gpt_oss", "codebook"),
    ],
)
def test_tokens_are_those_of_the_dense_weights(layout, architecture, kind, tmp_path) -> None:
    quantized, dense = make_quantized(layout, tmp_path, architecture)
    engine = load_engine(quantized, device=CUDA)
    assert engine.info.linear_kernels == f"triton ({kind}), torch"
    expected = generate_together(load_engine(dense, device=CUDA), TEXTS)
    assert generate_together(engine, TEXTS) == expected
    assert engine.fallbacks == ()
    assert generate_together(load_engine(quantized, device=CUDA, custom_kernels=False), TEXTS) == expected


def test_fp8_is_multiplied_by_tensor_cores_that_have_it(tmp_path) -> None:
    quantized, _ = make_quantized("fp8_rows", tmp_path)
    engine = load_engine(quantized, device=CUDA, dtype=torch.bfloat16)
    has = torch.cuda.get_device_capability() >= (8, 9)
    assert engine.info.linear_kernels == f"{'scaled_mm' if has else 'triton'} (fp8), torch"
    assert all(map(len, generate_together(engine, TEXTS)))
    assert engine.fallbacks == ()


@pytest.mark.parametrize("quantize", ["int4", "bitsandbytes-nf4", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_of_the_usual_size(quantize, dtype) -> None:
    layer = QuantizedLinear(torch.nn.Linear(4096, 11008, bias=False, device="meta"))
    layer.fill(ROUNDINGS[quantize][1](torch.randn(11008, 4096) * 0.02))
    weight = layer.to(CUDA).quantized
    names = [TRITON]
    if quantize == "fp8" and dtype is torch.bfloat16 and torch.cuda.get_device_capability() >= (8, 9):
        names.append(SCALED_MM)
    assert [fault_of([weight], name, dtype) for name in names] == [None] * len(names)
