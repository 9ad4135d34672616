"""The time that compiling takes in the first `tests/gpu/run.sh check`, counted in kernels: it fits the jobs' limits."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.gpu import test_attention
from tests.gpu.marks import DTYPES
from tests.gpu.run import CHECKS
from tests.gpu_without.check_passes import PAGED
from tests.gpu_without.fake_gpu import DEVICE, FakeGpu
from tests.unit.engine.backends.attention.test_backends import FP8, fp8
from tests.unit.engine.backends.attention.test_backends import run as attend
from tgi_server.contract import StoppingParameters
from tgi_server.engine import RunningSequence
from tgi_server.engine.backends.attention.base import AttentionVariant, KVShape
from tgi_server.engine.backends.attention.cuda import CudaAttention

# Seconds that a program takes to be compiled on a core, at most.
SECONDS = 2.0
# The share of a job's time that compiling may take; the rest is for what the job does.
SHARE = 0.75


def attention_kernels(gpu: FakeGpu) -> None:
    variants = [*test_attention.CASES, *((dtype, 128, 2, AttentionVariant(0.1)) for dtype in DTYPES)]
    formats = [None] * len(variants) + [fp8(cached) for cached in FP8 for _ in DTYPES]
    variants += [(dtype, 128, 2, AttentionVariant(0.1)) for _ in FP8 for dtype in DTYPES]
    for (dtype, head_dim, kv_heads, variant), kept in zip(variants, formats, strict=True):
        backend = CudaAttention(KVShape((kv_heads,), head_dim), DEVICE, dtype, kept)
        if variant.alibi_slopes is not None:
            variant = replace(variant, alibi_slopes=torch.ones(8))  # a tensor of the GPU that computes nothing
        if variant.sinks is not None:
            variant = replace(variant, sinks=torch.ones(8))
        attend(backend, 8, kv_heads, [1, 33, 900, 5000], [(0, 1), (0, 70), (1500, 100)], variant)
        attend(backend, 8, kv_heads, [1, 33, 900, 5000], [], variant)


def models(*dtypes: torch.dtype) -> Callable[[FakeGpu], None]:
    def run(gpu: FakeGpu) -> None:
        for architecture in PAGED:
            for dtype in dtypes:
                engine = gpu.engine(gpu.model(architecture, dtype), cuda_graphs=())
                engine.warm_up(max_batch_size=4, max_prefill_tokens=64, max_total_tokens=128)
                first, second = (
                    RunningSequence(i, [3] * 20, StoppingParameters(9, ignore_eos=True), blocks=[i]) for i in (1, 2)
                )
                engine.step(1, [first], [(1, 20)])
                engine.step(1, [second], [(2, 20)])
                engine.step(1)

    return run


# What the jobs run, in their order: what one has compiled is there for the next.
JOBS = {
    "attention kernels": attention_kernels,
    "graphs on and off, no waiting, memory": models(torch.float32),
    "parity per architecture": models(torch.bfloat16, torch.float16),
}


def test_what_is_compiled_fits_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {job.name: job.seconds for job in CHECKS}
    with FakeGpu(monkeypatch) as gpu:
        for name, run in JOBS.items():
            before = len(gpu.programs)
            run(gpu)
            added = len(gpu.programs) - before
            print(f"{name}: {added} programs to compile")
            assert added * SECONDS < SHARE * limits[name]
        assert len(gpu.programs) * SECONDS < SHARE * sum(limits.values())
