"""The same seed gives the same text on a GPU as on a CPU, and sampling never waits for the GPU."""

import pytest
import torch

from tests.gpu.marks import NEEDS_GPU
from tgi_server import demo_model
from tgi_server.contract import ReportParameters, SamplingParameters, StoppingParameters
from tgi_server.engine import Engine, EngineConfig
from tgi_server.engine.offline import generate
from tgi_server.engine.sampling import TorchSampler

pytestmark = NEEDS_GPU

PROMPTS = [[1, 40, 77, 300], [1, *range(50, 90)], [1, 5]]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParameters(),
        SamplingParameters(do_sample=True, temperature=1.2, seed=7),
        SamplingParameters(do_sample=True, top_p=0.8, top_k=30, seed=8, repetition_penalty=1.2),
        SamplingParameters(do_sample=True, typical_p=0.6, seed=9),
    ],
)
def test_devices_agree(sampling) -> None:
    texts = []
    for name in ("cpu", "cuda"):
        engine = Engine(EngineConfig(demo_model.PATH, dtype=torch.float32, device=torch.device(name)))
        texts.append(generate(engine, PROMPTS, StoppingParameters(32, ignore_eos=True), sampling, max_batch_size=8))
    assert texts[0] == texts[1]


def test_cuda_chooses_what_the_cpu_chooses_and_never_synchronises() -> None:
    kinds = [
        SamplingParameters(),
        SamplingParameters(do_sample=True, temperature=0.7, seed=2**64 - 1),
        SamplingParameters(do_sample=True, top_k=50, seed=1),
        SamplingParameters(do_sample=True, top_k=5000, top_p=0.9, seed=2),
        SamplingParameters(do_sample=True, typical_p=0.7, min_p=0.001, seed=3),
        SamplingParameters(
            repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5, count_penalty=0.5, logit_bias={4: 3.0}
        ),
        SamplingParameters(do_sample=True, watermark=True, seed=4),
    ]
    rows, vocab = list(range(len(kinds))), 50257
    generator = torch.Generator().manual_seed(0)
    logits = [(torch.randn(len(kinds), vocab, generator=generator) * 3).bfloat16() for _ in range(5)]
    texts = {}
    for name in ("cpu", "cuda"):
        device = torch.device(name)
        on_device = [step.to(device) for step in logits]
        torch.cuda.set_sync_debug_mode("error")
        try:
            sampler = TorchSampler(len(kinds), vocab, device)
            for row, kind in enumerate(kinds):
                sampler.add(row, kind, ReportParameters(logprobs=True, top_n_tokens=3), [1, 2, 3], [])
            pending = []
            for step in on_device:
                sampled = sampler.sample(step, rows)
                sampler.accept(sampled.token_ids, rows)
                pending.append(sampled.start_copy())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        texts[name] = [copy.wait() for copy in pending]
    for on_cpu, on_gpu in zip(texts["cpu"], texts["cuda"], strict=True):
        assert on_gpu.ids == on_cpu.ids
        assert on_gpu.logprobs == pytest.approx(on_cpu.logprobs, abs=1e-4)
