"""The memory that the largest steps take, on GPUs of several sizes that only count it."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, MixtralConfig

from tests.gpu_without.fake_gpu import CONTEXT, FakeGpu
from tests.unit.engine.linear.test_quantized import random_weight
from tgi_server.contract import ReportParameters, StoppingParameters
from tgi_server.engine import RunningSequence
from tgi_server.engine.linear.triton_quantized import TritonLinear
from tgi_server.engine.runners import prompt_graphs
from tgi_server.engine.sampling.choice import MOST_DEMANDING

ROWS = 256
PREFILL = 4096
FRACTION = 0.9
LLAMA = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
GEMMA = {
    "vocab_size": 256_000,
    "hidden_size": 3584,
    "intermediate_size": 14_336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 21,
    "max_position_embeddings": 8192,
}
BLOOM = {"vocab_size": 250_880, "hidden_size": 4096, "num_hidden_layers": 30, "num_attention_heads": 32}
MIXTRAL = LLAMA | {"vocab_size": 32_000, "num_local_experts": 8, "num_experts_per_tok": 2}
MODELS = {"llama": LLAMA, "gemma2": GEMMA, "bloom": BLOOM, "mixtral": MIXTRAL}
CASES = [
    (24, "llama", ""),
    (24, "bloom", ""),
    (40, "gemma2", ""),
    *((gigabytes, "llama", "") for gigabytes in (40, 80, 141)),
    (24, "llama", "int4"),
    (48, "mixtral", "int4"),
]


@pytest.mark.parametrize(("gigabytes", "architecture", "codes"), CASES)
def test_the_largest_step_fits(gigabytes: int, architecture: str, codes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the longest prompt beside rows that sample from the whole vocabulary; soft caps, alibi or neither."""
    total, rows = gigabytes << 30, ROWS
    monkeypatch.setattr(prompt_graphs, "TOKEN_COUNTS", prompt_graphs.TOKEN_COUNTS[-1:])  # it takes the memory
    with FakeGpu(monkeypatch, total) as gpu:
        model = gpu.model(architecture, quantized=codes, **MODELS[architecture])
        gpu.peak = gpu.live
        engine = gpu.engine(model, memory_fraction=FRACTION, cuda_graphs=(rows,))
        assert gpu.peak < total - CONTEXT, "packing the weights takes more than there is"
        capacity = engine.warm_up(rows, PREFILL)
        filled = gpu.live
        stopping, report = StoppingParameters(60, ignore_eos=True), ReportParameters(logprobs=True, top_n_tokens=5)
        running = [RunningSequence(i, [3], stopping, MOST_DEMANDING, report, blocks=[1]) for i in range(rows - 1)]
        engine.step(1, running, [(i, 1) for i in range(rows - 1)])
        length, size = capacity.max_total_tokens - 1, capacity.block_size
        blocks = [1] * -(-length // size)
        last = RunningSequence(
            rows, [3] * length, stopping, MOST_DEMANDING, report, blocks=blocks, computed=length - PREFILL
        )
        gpu.peak = gpu.live
        engine.step(1, [last], [(rows, PREFILL)])
        engine.step(1)
        assert gpu.peak + gpu.kept < FRACTION * total
        assert filled > 0.5 * FRACTION * total, "most of the memory is for weights and the KV cache"


@pytest.mark.parametrize("codes", ["", "int4", "fp8"])
def test_layers_are_arranged_one_after_the_other(codes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are never there twice, but for those of a few layers."""
    with FakeGpu(monkeypatch) as gpu:
        model = gpu.model("llama", quantized=codes, **LLAMA | {"num_hidden_layers": 8})
        gpu.peak = loaded = gpu.live
        engine = gpu.engine(model)
        assert (codes or "torch") in engine.info.linear_kernels
        assert gpu.peak < 1.25 * loaded


# The published sizes of large mixtures; the kind and the group of their experts' weights; if their other linear layers
# are quantized, too; how many GPUs of how many GB they are for; elements of a token's keys and values in a layer.
# docs/gpu.md has what comes of it.
MIXTURES = {
    "gpt-oss-120b": (
        GptOssConfig(num_hidden_layers=36, num_local_experts=128),
        "codebook",
        32,
        False,
        1,
        80,
        2 * 8 * 64,
    ),
    "Mixtral 8x7B AWQ": (MixtralConfig(vocab_size=32_000), "int4", 128, True, 1, 48, 2 * 8 * 128),
    "DeepSeek-V3": (DeepseekV3Config(), "fp8", 128, True, 8, 141, 8 * (512 + 64)),
}


def bytes_of_a_weight(kind: str, group: int) -> float:
    """Returns what the packed layout takes, with scales as precise as those of published checkpoints."""
    weight = random_weight(kind, 1024, 256, torch.arange(1024) // group)
    scales = {"codebook": weight.scales.log2().round().exp2(), "int4": weight.scales.half().float()}
    layer = TritonLinear(replace(weight, stored_scales=scales.get(kind, weight.scales)), None, None, torch.bfloat16)
    parts = [part for part in (layer._codes, layer._scales, layer._zeros) if part is not None]
    return sum(part.nbytes for part in parts) / (1024 * 256)


@pytest.mark.parametrize("name", MIXTURES)
def test_large_mixtures_fit_on_their_gpus(name: str) -> None:
    config, kind, group, all_linear, gpus, gigabytes, kv_elements = MIXTURES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    packed, total = bytes_of_a_weight(kind, group), 0.0
    for path, parameter in model.named_parameters():
        expert = ".experts." in path and "bias" not in path
        linear = parameter.dim() == 2 and not any(
            part in path for part in ("embed", "lm_head", "gate.weight", "router")
        )
        total += parameter.numel() * (packed if expert or (linear and all_linear) else 2)
    of_token = 2 * kv_elements * config.num_hidden_layers / gpus
    # what is left of a GPU's nominal memory by its own bookkeeping and by CUDA; then as `cache_bytes` takes it
    usable = 0.95 * (0.97 * (gigabytes << 30) - CONTEXT)
    tokens = int((usable - total / gpus - (2 << 30)) / of_token)
    print(f"{name}: {packed:.4f} bytes a weight, {total / 1e9:.1f} GB, {tokens} tokens")
    assert tokens > 32_768
