"""The memory that the largest steps take, on GPUs of several sizes that only count it."""

import pytest

from tests.gpu_without.fake_gpu import CONTEXT, FakeGpu
from tgi_server.contract import ReportParameters, StoppingParameters
from tgi_server.engine import RunningSequence
from tgi_server.engine.engine import MOST_DEMANDING
from tgi_server.engine.runners import prompt_graphs

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
