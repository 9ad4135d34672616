"""Readers of quantised checkpoints on files written by hand: the weights, and the tokens that they lead to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.quantized_models import LAYOUTS, make_quantized
from tests.unit.engine.requests import generate_together, load_engine, prompts
from tgi_server.engine.checkpoint.quantized import find_quantization
from tgi_server.engine.checkpoint.reader import open_checkpoint

TEXTS = prompts((1, 20, 5, 33))
LINEAR_LAYOUTS = [layout for layout in LAYOUTS if layout != "mxfp4"]
# One of each kind of codes.
KINDS = ("gptq_act_order", "gptq_dynamic", "auto_round_awq", "modelopt_fp8", "nf4", "w8a16", "fp8_blocks")


def slow(values: Sequence[str], *but: str) -> list[Any]:
    """Returns values to parametrize with, all of them slow but some."""
    return [value if value in but else pytest.param(value, marks=pytest.mark.slow) for value in values]


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    return generate_together(load_engine(folder, **settings), TEXTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_read_as_what_they_stand_for(layout, tmp_path) -> None:
    quantized, dense = make_quantized(layout, tmp_path, "gpt_oss" if layout == "mxfp4" else "llama")
    found = find_quantization(quantized, AutoConfig.from_pretrained(quantized), None)
    expected = load_file(dense / "model.safetensors")
    with open_checkpoint(quantized, quantization=found) as tensors:
        for name, tensor in expected.items():
            assert tuple(tensors[name].shape) == tuple(tensor.shape)
            torch.testing.assert_close(tensors[name][...].to(tensor.dtype), tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", slow(LINEAR_LAYOUTS, *KINDS))
def test_tokens_are_those_of_the_dense_weights(layout, tmp_path) -> None:
    quantized, dense = make_quantized(layout, tmp_path)
    assert tokens(quantized) == tokens(dense)


@pytest.mark.parametrize(
    ("layout", "architecture"),
    [
        pytest.param("gptq", "qwen2", marks=pytest.mark.slow),
        ("awq", "opt"),
        pytest.param("nf4", "gpt_neox", marks=pytest.mark.slow),
        pytest.param("w4a16", "phi3", marks=pytest.mark.slow),
        pytest.param("gptq", "gpt2", marks=pytest.mark.slow),
        pytest.param("gptq", "mixtral", marks=pytest.mark.slow),
        pytest.param("fp8_blocks", "qwen3_moe", marks=pytest.mark.slow),
        pytest.param("fp8_blocks", "deepseek_v3", marks=pytest.mark.slow),
        pytest.param("gptq", "minicpm3", marks=pytest.mark.slow),
        pytest.param("w4a16", "gemma4_text", marks=pytest.mark.slow),
        pytest.param("awq", "falcon_7b", marks=pytest.mark.slow),
        pytest.param("gptq", "mamba", marks=pytest.mark.slow),
        ("mxfp4", "gpt_oss"),
    ],
)
def test_other_architectures_and_mixtures_of_experts(layout, architecture, tmp_path) -> None:
    quantized, dense = make_quantized(layout, tmp_path, architecture)
    assert tokens(quantized) == tokens(dense)


def test_bytes_of_bitsandbytes_may_be_stored_as_floats(tmp_path) -> None:
    """As by those who train with FSDP, which wants one dtype for all."""
    quantized, dense = make_quantized("nf4", tmp_path, num_hidden_layers=1)
    file = quantized / "model.safetensors"
    stored = {
        name: tensor.flatten().view(torch.bfloat16).view(-1, 1) if name.endswith("_proj.weight") else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(stored, file)
    assert tokens(quantized) == tokens(dense)


@pytest.mark.parametrize("plain", [("layers.0.self_attn.q_proj", "layers.1.mlp.gate_proj"), ("down_proj", "o_proj")])
def test_some_layers_of_a_model_may_be_left_as_they_were(plain, tmp_path) -> None:
    quantized, dense = make_quantized("w4a16", tmp_path, keep=plain)
    assert tokens(quantized) == tokens(dense)


@pytest.mark.parametrize("layout", ["gptq_act_order", "gptq_asymmetric"])
def test_without_kernels_plain_torch_computes_the_same(layout, tmp_path) -> None:
    quantized, dense = make_quantized(layout, tmp_path)
    assert tokens(quantized, custom_kernels=False) == tokens(dense)
