"""Every architecture, token for token equal to `transformers`, in float32."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, cache_utils

from tests.tiny_models import ARCHITECTURES, WITH_IMAGES, make, make_gemma3n, make_with_images
from tests.unit.engine.requests import LENGTHS, NEW, Requests, expected_tokens, load_engine, prompts

PADDED = {
    "bart",
    "codegen",
    "flan_t5",
    "mamba",
    "t5",
}
if not hasattr(cache_utils, "DummyLayer"):  # older than the engine asks for, as on some machines with a GPU
    PADDED |= {"gemma3n", "gemma3n_text", "gemma4", "gemma4_text"}
# The answers of the first two depend on the limits: see test_rope.py. The third is refused: see padded/test_probe.py.
ELSEWHERE = {"llama_dynamic", "phi3_longrope", "rwkv"}
# One of each kind: attention modules of our own, soft caps and windows, shared keys, latents, experts, one KV head,
# states of fixed size, and an encoder. The others are slow tests.
QUICK = {"bloom", "deepseek_v3", "gemma2", "gemma4_text", "llama", "mamba", "mixtral", "opt", "santacoder", "t5"}


def quick(names: Iterable[str], chosen: Iterable[str] = QUICK) -> list[object]:
    """Returns the names as parameters; those that are not chosen are slow."""
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.slow) for name in names]


def overlap(folder: Path, **settings) -> tuple[Requests, list[list[int]]]:
    texts = prompts()
    requests = Requests(load_engine(folder, **settings), texts)
    run_overlapping(requests)
    return requests, expected_tokens(folder, texts)


def run_overlapping(requests: Requests) -> None:
    """Requests join two at a time, prompts in chunks; two leave for good, one leaves and comes back."""
    for step in range(len(LENGTHS) // 2):
        requests.join(2 * step)
        requests.join(2 * step + 1)
        requests.step(decode=step != 3)
        if step == 5:
            requests.leave(4, 5)
        if step == 6:
            requests.leave(1)
    requests.step()
    requests.join(1)
    requests.finish()


def check(requests: Requests, expected: list[list[int]]) -> None:
    check_outputs(requests.outputs, expected)


def check_outputs(outputs: list[list[int]], expected: list[list[int]]) -> None:
    assert len({token for tokens in expected for token in tokens}) > 10, "a model that says nothing proves nothing"
    for index, tokens in enumerate(expected):
        if index in (4, 5):
            assert 0 < len(outputs[index]) < NEW
            tokens = tokens[: len(outputs[index])]
        assert outputs[index] == tokens, f"request {index}, of {LENGTHS[index]} tokens"


@pytest.mark.parametrize("architecture", quick(sorted(ARCHITECTURES.keys() - ELSEWHERE)))
def test_overlapping_requests_get_the_tokens_of_transformers(architecture, tmp_path) -> None:
    requests, expected = overlap(make(architecture, tmp_path))
    assert requests.engine.info.paged is (architecture not in PADDED)
    check(requests, expected)


@pytest.mark.slow
def test_the_text_of_gemma_3n_needs_no_library_for_images(tmp_path) -> None:
    requests = Requests(load_engine(make_gemma3n(tmp_path / "whole")), prompts())
    run_overlapping(requests)
    check(requests, expected_tokens(make("gemma3n_text", tmp_path / "text"), prompts()))


@pytest.mark.parametrize("model_type", quick(WITH_IMAGES, {"mistral3", "qwen3_vl"}))
def test_texts_of_models_that_read_images_too(model_type, tmp_path) -> None:
    requests, expected = overlap(make_with_images(model_type, tmp_path))
    assert requests.engine.info.paged is (model_type not in PADDED)
    check(requests, expected)


@pytest.mark.parametrize(
    "architecture", quick(["bloom_6_heads", "falcon_rw", "flan_t5", "gemma2", "mistral", "starcoder"], ["mistral"])
)
def test_overlapping_requests_get_the_tokens_of_transformers_without_custom_kernels(architecture, tmp_path) -> None:
    check(*overlap(make(architecture, tmp_path), custom_kernels=False))


@pytest.mark.parametrize("architecture", quick(["llama", "mistral", "opt", "qwen2", "qwen2_windows"], ["llama"]))
@pytest.mark.parametrize(("dtype", "quantize"), [("bfloat16", None), ("bfloat16", "int8"), ("float16", None)])
def test_in_16_bits_each_token_is_as_likely_as_the_likeliest_or_nearly_so(
    architecture, dtype, quantize, tmp_path
) -> None:
    folder = make(architecture, tmp_path)
    requests, _ = overlap(folder, dtype=getattr(torch, dtype), quantize=quantize)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).float()
    behind = torch.cat([lost(model, text, output) for text, output in zip(prompts(), requests.outputs, strict=True)])
    assert len(behind) > len(LENGTHS) * NEW / 2
    assert behind.max() < (0.06 if quantize is None else 0.4)


def lost(model: torch.nn.Module, prompt: list[int], output: list[int]) -> Tensor:
    """Returns how far each output token's logit is below the largest, in standard deviations: [tokens]."""
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return behind_likeliest(logits, torch.tensor(output))


def behind_likeliest(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns how far the logit of a token of each row is below the largest, in standard deviations: [rows]."""
    chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return (logits.max(1).values - chosen) / logits.std(1)
