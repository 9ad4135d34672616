"""GGUF files: the numbers of every type, and tokens that are those of the dense weights."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from tests.gguf_models import HALVES, make_gguf, make_wide, random_blocks
from tests.tiny_models import make
from tests.unit.engine.requests import generate_together, load_engine, prompts
from tgi_server.engine.checkpoint.quantized.formats.gguf import TYPES, quantized_weight
from tgi_server.engine.checkpoint.safetensors_files import open_checkpoint
from tgi_server.engine.errors import EngineError
from tgi_server.model_files.gguf_models import described

TEXTS = prompts((1, 20, 5, 33))


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


def tokens(folder: Path, **settings) -> list[list[int]]:
    return generate_together(load_engine(folder, **settings), TEXTS)


def mixed(name: str) -> str:
    """Returns the types of a file that is called Q4_K_M: values, down projections and the head have more bits."""
    return "Q6_K" if "attn_v" in name or "ffn_down" in name or name == "output.weight" else "Q4_K"


@pytest.mark.parametrize("kind", TYPES)
def test_numbers_are_those_of_llama_cpp_to_the_last_bit(kind) -> None:
    raw = random_blocks(kind, 5, 512, deviation=1.0)
    expected = gguf.dequantize(raw, GGMLQuantizationType[kind])
    blocks = torch.from_numpy(raw).view(5, -1, gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1])
    weight = quantized_weight(kind, blocks)
    np.testing.assert_array_equal(weight.dense().numpy().view(np.uint32), expected.view(np.uint32))
    torch.testing.assert_close(weight.without_offsets().dense(), torch.from_numpy(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q5_K", "Q2_K"])
def test_a_scale_of_0_beside_an_offset_keeps_the_offset(kind) -> None:
    raw = random_blocks(kind, 3, 512, deviation=1.0)
    size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = raw.reshape(3, -1, size)
    blocks[:, 0, HALVES[kind][0] : HALVES[kind][0] + 2] = 0
    expected = gguf.dequantize(raw, GGMLQuantizationType[kind])
    weight = quantized_weight(kind, torch.from_numpy(blocks))
    for form in (weight, weight.without_offsets()):
        torch.testing.assert_close(form.dense(), torch.from_numpy(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kinds",
    [
        mixed,
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("F32", "F16", "BF16", "IQ2_XS", *TYPES)),
    ],
)
def test_tokens_are_those_of_the_dense_weights(kinds, tmp_path) -> None:
    file, dense = make_wide("llama", tmp_path, kinds)
    assert tokens(described(file)) == tokens(dense)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("qwen2", {}),
        ("qwen3", {"head_dim": 64}),
        ("mixtral", {}),
        ("gemma2", {"tie_word_embeddings": True, "head_dim": 64, "query_pre_attn_scalar": 64}),
    ],
)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_architectures(architecture, settings, kind, tmp_path) -> None:
    file, dense = make_wide(architecture, tmp_path, kind, **settings)
    assert tokens(described(file)) == tokens(dense)


def test_tensors_have_the_names_and_numbers_of_transformers(tmp_path) -> None:
    file, dense = make_gguf(make("mixtral", tmp_path / "mixtral"), tmp_path, "Q8_0")
    with open_checkpoint(described(file)) as found, open_checkpoint(dense) as expected:
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name][...], tensor[...], rtol=0, atol=0)


def test_the_types_are_reported(tmp_path) -> None:
    file, _ = make_wide("llama", tmp_path, mixed)
    assert load_engine(described(file)).info.quantization == "GGUF, Q4_K, Q6_K"


def test_unquantised_files_can_be_quantised_while_loading(tmp_path) -> None:
    file, dense = make_gguf(make("llama", tmp_path / "llama"), tmp_path, "F32")
    assert tokens(described(file), quantize="int4") == tokens(dense, quantize="int4")


def test_quantised_files_are_not_quantised_again(tmp_path) -> None:
    file, _ = make_gguf(make("llama", tmp_path / "llama"), tmp_path, "Q8_0")
    with pytest.raises(EngineError, match=r"--quantize int4 contradicts the checkpoint, whose weights are GGUF, Q8_0"):
        load_engine(described(file), quantize="int4")
