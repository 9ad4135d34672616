"""A KV cache in 8 bits, through the engine: the room it makes, the checkpoint's scales, and who has none."""

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
    errors = []
    for scale in (1.0, 1024.0):
        scales = {f"model.layers.{layer}.self_attn.k_scale": torch.tensor([scale]) for layer in range(2)}
        save_file(tensors | scales, folder / "model.safetensors")
        errors.append((logprobs(load_engine(folder, kv_cache_dtype=E4M3)) - exact).abs().mean())
    assert errors[1] < errors[0] / 5


def test_models_that_run_in_padded_batches_have_no_such_cache(tmp_path) -> None:
    with pytest.raises(UnsupportedModel, match="--kv-cache-dtype fp8_e4m3fn is for models whose batches are paged; t5"):
        load_engine(make("flan_t5", tmp_path), kv_cache_dtype=E4M3)
