"""Steps of every architecture on a GPU that computes nothing: no operation mixes devices, and nothing waits for it."""

import pytest
import torch

from tests.gpu_without.fake_gpu import GROUPED_MM, FakeGpu
from tests.tiny_models import ARCHITECTURES, ONE_BY_ONE, PLAIN_ON_GPUS
from tests.unit.engine.runners.test_parity import ELSEWHERE, PADDED
from tgi_server.contract import ReportParameters, SamplingParameters, StoppingParameters
from tgi_server.engine import Engine, RunningSequence
from tgi_server.engine.runners import prompt_graphs
from tgi_server.engine.sampling.choice import MOST_DEMANDING

PAGED = sorted(ARCHITECTURES.keys() - ELSEWHERE - PADDED)
STOPPING = StoppingParameters(60, ignore_eos=True)
REPORT = ReportParameters(logprobs=True, top_n_tokens=3)


@pytest.mark.parametrize(
    ("architecture", "kernels"),
    [*((name, True) for name in PAGED), ("llama", False), ("gemma2", False), ("bloom", False)],
)
def test_steps(architecture: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_graphs, "TOKEN_COUNTS", (32, 64))
    with FakeGpu(monkeypatch) as gpu:
        engine = gpu.engine(gpu.model(architecture), kernels=kernels, cuda_graphs=(2, 8))
        engine.warm_up(max_batch_size=8, max_prefill_tokens=64, max_total_tokens=128)
        gpu.waits.clear()
        run(engine)
        assert gpu.waits == []
        slower = {fallback.partition(",")[0].partition(":")[0] for fallback in engine.fallbacks}
        if not kernels or architecture in PLAIN_ON_GPUS:
            assert slower - {"attention runs in plain torch"} == {"decoding runs without CUDA graphs"}
            assert ("attention runs in plain torch" in slower) is kernels
        else:
            assert slower == ({"computing prompts runs without CUDA graphs"} if architecture in ONE_BY_ONE else set())


@pytest.mark.parametrize(
    ("architecture", "codes", "kernels"),
    [
        ("llama", "int4", "triton (int4), torch"),
        ("llama", "fp8", "scaled_mm (fp8), torch"),
        ("llama", "int4", "torch"),
        ("gemma2", "int4", "triton (int4), torch"),
        ("mixtral", "int4", "triton (int4), torch"),
        ("gpt_oss", "fp8", "scaled_mm (fp8), torch"),
    ],
)
def test_steps_of_quantised_models(
    architecture: str, codes: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeGpu(monkeypatch) as gpu:
        model = gpu.model(architecture, quantized=codes)
        engine = gpu.engine(model, kernels=kernels != "torch", cuda_graphs=(2, 8))
        assert engine.info.linear_kernels == kernels
        engine.warm_up(max_batch_size=8, max_prefill_tokens=64, max_total_tokens=128)
        gpu.waits.clear()
        run(engine)
        assert gpu.waits == []
        assert engine.fallbacks == ()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixtures_never_wait(dtype: torch.dtype, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_graphs, "TOKEN_COUNTS", (32, 64))
    with FakeGpu(monkeypatch, capability=capability) as gpu:
        engine = gpu.engine(gpu.model("qwen3_moe", dtype), cuda_graphs=(2, 8))
        engine.warm_up(max_batch_size=8, max_prefill_tokens=64, max_total_tokens=128)
        gpu.waits.clear()
        run(engine)
        assert gpu.waits == []
        assert engine.fallbacks == ()
        own = dtype is not torch.bfloat16 or capability not in GROUPED_MM
        assert any(name == "_multiply_groups" for name, *_ in gpu.programs) is own


def test_gpus_that_are_older_than_the_kernels_take_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeGpu(monkeypatch, capability=(7, 5)) as gpu:
        engine = gpu.engine(gpu.model("llama", torch.float16, "int4"))
        engine.warm_up(max_batch_size=8, max_prefill_tokens=64, max_total_tokens=128)
        run(engine)
        assert engine.info.linear_kernels == "torch"
        attention, graphs, weights = sorted(engine.fallbacks)
        assert attention.startswith("attention runs in plain torch")
        assert graphs.startswith("decoding runs without CUDA graphs")
        for fallback in (attention, weights):
            assert fallback.endswith("the kernels need a GPU of compute capability 8.0; this one has 7.5")
        assert {name for name, *_ in gpu.programs} == {"_choose"}


def run(engine: Engine) -> None:
    """Prompts in chunks beside running sequences, each of which samples in another way; blocks granted, one leaves."""
    kinds = [
        SamplingParameters(),
        SamplingParameters(do_sample=True, temperature=0.7, top_k=20, seed=1),
        MOST_DEMANDING,
        SamplingParameters(logit_bias={4: 3.0}, min_tokens=3, late_tokens=(2,)),
    ]
    sequences = [
        RunningSequence(i, [3, 4, 5], STOPPING, kind, REPORT, blocks=[4 * i + 1]) for i, kind in enumerate(kinds)
    ]
    engine.step(1, sequences, [(i, 3) for i in range(len(kinds))])
    engine.step(1)
    late = RunningSequence(9, list(range(3, 43)), STOPPING, blocks=[20, 21, 22])
    engine.step(1, [late], [(9, 30)])
    engine.step(1, [], [(9, 10)], grants=[(0, [30])])
    engine.step(1)
    engine.keep(1, [1, 2, 9])
    engine.step(1)
