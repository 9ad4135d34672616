"""GGUF files: the numbers of every type, and tokens that are those of the dense weights."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

from tests.gguf_by_names import SETTINGS, write_gguf
from tests.gguf_models import HALVES, make_gguf, make_wide, random_blocks
from tests.tiny_models import make
from tests.unit.engine.requests import generate_together, load_engine, prompts
from tgi_server.engine.checkpoint.quantized import QuantizedLinear
from tgi_server.engine.checkpoint.quantized.formats.gguf import TYPES, quantized_weight
from tgi_server.engine.checkpoint.quantized.gguf_tensors import BlockTensor
from tgi_server.engine.checkpoint.quantized.weight import by_pieces
from tgi_server.engine.checkpoint.reader import open_checkpoint
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [
        "falcon_h1",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_text_moe",
        "granitemoehybrid",
        "granitemoehybrid dense",
        "jamba",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "nemotron_h",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
    ],
)
def test_newer_architectures(architecture, tmp_path) -> None:
    model = make(architecture.split()[0], tmp_path / "model", **SETTINGS.get(architecture, {}))
    file = write_gguf(model, tmp_path / "file.gguf", "Q8_0")
    dense = tmp_path / "dense"
    dense.mkdir()
    for part in model.glob("*.json"):
        (dense / part.name).write_text(part.read_text())
    with open_checkpoint(described(file)) as found, open_checkpoint(model) as original:
        numbers = {name: found[name][...].float().contiguous() for name in found}
        names = {name.replace("backbone.", "model.") if architecture == "nemotron_h" else name for name in original}
        for name in names - numbers.keys():  # of all experts in one tensor, which the file has one by one
            stem, _, part = name.removesuffix(".weight").rpartition(".")
            parts = ["gate_proj", "up_proj"] if part in ("gate_up_proj", "input_linear") else ["down_proj"]
            one = stem if stem.endswith("experts") else f"{stem}.experts"
            experts = range(original[name].shape[0])
            numbers[name] = torch.stack(
                [torch.cat([numbers.pop(f"{one}.{expert}.{each}.weight") for each in parts]) for expert in experts]
            )
    save_file(numbers, dense / "model.safetensors", metadata={"format": "pt"})
    assert tokens(described(file)) == tokens(dense)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("granitemoehybrid", {}),
        (
            "falcon_h1",
            {
                "attention_in_multiplier": 0.9,
                "attention_out_multiplier": 0.8,
                "embedding_multiplier": 2.0,
                "key_multiplier": 0.5,
                "lm_head_multiplier": 0.5,
                "mlp_multipliers": [1.1, 0.9],
                "ssm_in_multiplier": 0.7,
                "ssm_multipliers": [0.9, 0.8, 0.7, 0.6, 0.5],
                "ssm_out_multiplier": 0.6,
            },
        ),
    ],
)
def test_tokens_of_unquantised_files_are_those_of_the_model(architecture, settings, tmp_path) -> None:
    """Experts are one tensor; the multipliers of Falcon-H1 are part of the weights."""
    model = make(architecture, tmp_path / "model", **SETTINGS.get(architecture, {}) | settings)
    assert tokens(described(write_gguf(model, tmp_path / "file.gguf"))) == tokens(model)


def test_weights_take_little_more_memory_than_the_file(tmp_path) -> None:
    """The embedding stays quantised, and a tied head has the same weight."""
    file, _ = make_wide("llama", tmp_path, "Q4_K", vocab_size=16384, tie_word_embeddings=True)
    before = tensor_bytes()
    engine = load_engine(described(file), dtype=torch.bfloat16)
    assert engine.info.quantization == "GGUF, Q4_K"
    held = sum(size for place, size in tensor_bytes().items() if place not in before)
    assert held < 1.2 * file.stat().st_size


def test_no_weight_is_made_dense_while_loading(tmp_path, monkeypatch) -> None:
    """The head of a large vocabulary alone would take seconds."""
    made = QuantizedLinear.weight.fget

    def weight(layer: QuantizedLinear) -> torch.Tensor:
        assert "quantized" not in vars(layer)
        return made(layer)

    monkeypatch.setattr(QuantizedLinear, "weight", property(weight))
    file, _ = make_wide("llama", tmp_path, "Q4_K", tie_word_embeddings=True)
    assert load_engine(described(file), dtype=torch.bfloat16).info.quantization == "GGUF, Q4_K"


def tensor_bytes() -> dict[int, int]:
    """Returns the sizes of the memory of all tensors in this process, by where it begins."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


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


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_a_weight_is_read_and_computed_in_pieces_by_threads(kind: str) -> None:
    raw = random_blocks(kind, 2500, 1024, deviation=1.0)
    blocks = torch.from_numpy(raw).view(2500, -1, gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1])
    whole = quantized_weight(kind, blocks)
    (weight,) = BlockTensor(kind, (2500, 1024), (lambda: raw,)).weights()
    for piece, known in zip(weight.tensors(), whole.tensors(), strict=True):
        assert torch.equal(piece, known)
    layer = QuantizedLinear(torch.nn.Linear(1024, 2500, bias=False, device="meta"))
    layer.fill(weight)
    inputs = torch.randn(3, 1024)
    with torch.inference_mode():
        found = layer(inputs)
    assert found.is_inference()
    torch.testing.assert_close(found, inputs @ whole.dense().T, rtol=1e-4, atol=1e-3)


def test_threads_that_start_after_a_weight_was_read_have_all_of_torch() -> None:
    threads = torch.get_num_threads()
    assert by_pieces(lambda piece: (piece, torch.get_num_threads()), range(4)) == [(piece, 1) for piece in range(4)]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == torch.get_num_threads() == threads
