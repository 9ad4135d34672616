"""A KV cache in 8 bits, through the engine: the room it makes, the checkpoint's scales, and who has none."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import make
from tests.unit.engine.requests import generate_alone, generate_together, load_engine, prompts
from tgi_server.contract import ReportParameters, StoppingParameters
from tgi_server.engine import Engine, RunningSequence
from tgi_server.engine.config import KV_CACHE_DTYPES
from tgi_server.engine.driver import Driver
from tgi_server.engine.errors import UnsupportedModel

E4M3 = "fp8_e4m3fn"
TEXTS = prompts((1, 70, 5, 33))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama"))


def logprobs(engine: Engine) -> torch.Tensor:
    """Returns those of the tokens of a prompt, which is computed in two chunks."""
    engine.warm_up(max_batch_size=1, max_prefill_tokens=64, max_total_tokens=128)
    report = ReportParameters(prefill_logprobs=True)
    driver = Driver(engine)
    output = driver.add(RunningSequence(0, TEXTS[1], StoppingParameters(1), report=report), [40, 30])
    driver.run()
    (generation,) = output.generations
    assert generation.prompt_tokens is not None
    return torch.tensor(generation.prompt_tokens.logprobs[1:])


def test_the_same_memory_holds_twice_the_tokens(llama) -> None:
    tokens = {}
    for name in (None, *KV_CACHE_DTYPES):
        engine = load_engine(llama, torch.bfloat16, cpu_memory=1 << 20, kv_cache_dtype=name)
        tokens[engine.info.kv_cache_dtype] = engine.warm_up(64, 64, 128).max_batch_total_tokens
    assert tokens["fp8_e4m3fn"] == tokens["fp8_e5m2"]
    assert 2 * tokens["bfloat16"] <= tokens["fp8_e5m2"] <= 2 * tokens["bfloat16"] + 64


@pytest.mark.parametrize("custom_kernels", [True, False])
@pytest.mark.parametrize("name", KV_CACHE_DTYPES)
def test_requests_that_run_together_say_what_they_say_alone(llama, name, custom_kernels) -> None:
    engine = load_engine(llama, kv_cache_dtype=name, custom_kernels=custom_kernels)
    assert generate_together(engine, TEXTS) == generate_alone(engine, TEXTS)


@pytest.mark.parametrize("name", KV_CACHE_DTYPES)
def test_kernels_and_plain_torch_keep_the_same_numbers(llama, name) -> None:
    kernels, plain = (
        logprobs(load_engine(llama, kv_cache_dtype=name, custom_kernels=custom)) for custom in (True, False)
    )
    exact = logprobs(load_engine(llama))
    assert (kernels - plain).abs().mean() < (kernels - exact).abs().mean() / 10


def test_scales_of_the_checkpoint_are_used(llama, tmp_path) -> None:
    """Keys a thousand times as large, and queries as much smaller, are the same model; their scale makes them fit."""
    folder = tmp_path / "scaled"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    exact = logprobs(load_engine(folder))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "k_proj" in name:
            tensor *= 1024
        if "q_proj" in name:
            tensor /= 1024
    formats = []
    for scale in (1.0, 1024.0):
        scales = {f"model.layers.{layer}.self_attn.k_scale": torch.tensor([scale]) for layer in range(2)}
        save_file(tensors | scales, folder / "model.safetensors")
        engine = load_engine(folder, kv_cache_dtype=E4M3)
        formats.append(engine.info.kv_cache_dtype)
    assert formats == [f"{E4M3} (keys: float32)", E4M3]
    assert (logprobs(engine) - exact).abs().mean() < 0.1


def changed(source: Path, folder: Path, change: Callable[[str, torch.Tensor], None]) -> Path:
    """Writes a model with other weights. change: is called with the name of each, and the weight."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        change(name, tensor)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def biased(tmp_path_factory) -> Path:
    """A model with keys as Qwen 2 has them: a large bias in two channels of each head, to which queries are small."""

    def add_bias(name: str, tensor: torch.Tensor) -> None:
        if "k_proj.bias" in name:
            tensor.view(2, 16)[:, [7, 15]] += 300
        if "q_proj" in name:
            tensor.view(4, 16, *tensor.shape[1:])[:, [7, 15]] /= 4

    folder = tmp_path_factory.mktemp("biased")
    return changed(make("qwen2", folder / "plain"), folder / "biased", add_bias)


@pytest.mark.parametrize("custom_kernels", [True, False])
@pytest.mark.parametrize("name", KV_CACHE_DTYPES)
def test_keys_that_8_bits_are_too_few_for_stay_in_the_dtype_of_the_model(biased, name, custom_kernels, caplog) -> None:
    engine = load_engine(biased, kv_cache_dtype=name, custom_kernels=custom_kernels)
    assert engine.info.kv_cache_dtype == f"{name} (keys: float32)"
    assert f"a cache in {name} makes the model worse by" in caplog.text
    exact = logprobs(load_engine(biased))
    assert (logprobs(engine) - exact).abs().mean() < 0.1


def test_prompts_and_replies_of_unequal_keys_and_values_say_the_same(biased) -> None:
    engine = load_engine(biased, torch.bfloat16, kv_cache_dtype=E4M3)
    assert engine.info.kv_cache_dtype == f"{E4M3} (keys: bfloat16)"
    assert generate_together(engine, TEXTS) == generate_alone(engine, TEXTS)


def test_a_cache_that_costs_too_much_is_not_used(llama, tmp_path, caplog) -> None:
    """Values beyond the largest number of FP8."""

    def enlarge(name: str, tensor: torch.Tensor) -> None:
        if "v_proj" in name:
            tensor *= 4096
        if "o_proj" in name:
            tensor /= 4096

    engine = load_engine(changed(llama, tmp_path / "large", enlarge), kv_cache_dtype=E4M3)
    assert engine.info.kv_cache_dtype == "float32"
    assert "the KV cache stays in float32" in caplog.text


def test_models_that_run_in_padded_batches_have_no_such_cache(tmp_path) -> None:
    with pytest.raises(UnsupportedModel, match="--kv-cache-dtype fp8_e4m3fn is for models whose batches are paged; t5"):
        load_engine(make("flan_t5", tmp_path), kv_cache_dtype=E4M3)
