"""The same on a GPU, and without waiting for it."""

import pytest
import torch

from tgi_server.contract import ReportParameters, SamplingParameters
from tgi_server.engine.sampling import Sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_cuda_chooses_what_the_cpu_chooses_and_never_synchronises() -> None:
    kinds = [
        SamplingParameters(),
        SamplingParameters(do_sample=True, temperature=0.7, seed=2**64 - 1),
        SamplingParameters(do_sample=True, top_k=50, seed=1),
        SamplingParameters(do_sample=True, top_k=5000, top_p=0.9, seed=2),
        SamplingParameters(do_sample=True, typical_p=0.7, min_p=0.001, seed=3),
        SamplingParameters(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5, logit_bias={4: 3.0}),
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
            sampler = Sampler(len(kinds), vocab, device)
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
