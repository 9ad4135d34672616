"""Chooses the sampler for a device, and rehearses it with requests that use every option."""

from functools import partial

import torch
from torch import Tensor

from tgi_server.contract import ReportParameters, SamplingParameters
from tgi_server.engine.parallel.group import ShardGroup, fault_of_any
from tgi_server.engine.sampling.cpu_sampler import CpuSampler
from tgi_server.engine.sampling.processors import WatermarkSettings
from tgi_server.engine.sampling.sampler import Sampler
from tgi_server.engine.sampling.torch_sampler import TorchSampler, row_kernel_fault

# A request whose sampling takes the most memory.
MOST_DEMANDING = SamplingParameters(
    do_sample=True,
    temperature=0.7,
    top_k=1000,
    top_p=0.9,
    typical_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    count_penalty=0.1,
    watermark=True,
    seed=1,
)


class SamplerChoice:
    """Creates the samplers of one model: with CPU kernels, in torch, or with a GPU kernel that has passed a test."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        watermark: WatermarkSettings,
        group: ShardGroup | None,
        *,
        on_cpu: bool,
        custom_kernels: bool,
    ) -> None:
        """on_cpu: True samples with CPU kernels. group: the shards of the model, which have to choose the same tokens.

        custom_kernels: False keeps to torch's operations on GPUs.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._watermark = watermark
        self._group = group
        self._on_cpu = on_cpu
        self._custom_kernels = custom_kernels
        self._row_kernel = False  # True once the sampling kernel has passed its test

    def create(self, rows: int) -> Sampler:
        if self._on_cpu:
            return CpuSampler(rows, self._vocab_size, self._watermark)
        return self._in_torch(rows, row_kernel=self._row_kernel)

    def rehearse(self, logits: Tensor) -> str | None:
        """Samples from logits, [rows, vocab_size], with every option, as warm-up. Then tests the sampling kernel.

        Returns why the kernel is not used; None if it is, or if `custom_kernels` is False.
        """
        rows = range(len(logits))
        sampler = self._in_torch(len(logits), row_kernel=False)
        for row in rows:
            sampler.add(row, MOST_DEMANDING, ReportParameters(logprobs=True, top_n_tokens=5), [0], [])
        sampler.accept(sampler.sample(logits, rows).token_ids, rows)
        if not self._custom_kernels:
            return None
        fault = fault_of_any(row_kernel_fault(partial(self._in_torch, len(logits)), logits), self._group)
        self._row_kernel = fault is None
        return fault

    def _in_torch(self, rows: int, *, row_kernel: bool) -> TorchSampler:
        return TorchSampler(rows, self._vocab_size, self._device, self._watermark, row_kernel=row_kernel)
