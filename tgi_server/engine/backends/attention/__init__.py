"""Attention over the paged KV cache: one interface, one file per implementation."""

import torch

from tgi_server.engine.backends.attention.base import AttentionBackend, KVShape
from tgi_server.engine.backends.attention.kv_format import KVFormat


def create_attention_backend(
    shape: KVShape,
    device: torch.device,
    dtype: torch.dtype,
    kv_format: KVFormat | None = None,
    *,
    custom_kernels: bool = True,
) -> AttentionBackend:
    """Returns the fastest backend that computes the right result for this model on this device.

    kv_format: how keys and values are kept; None: in `dtype`.
    """
    if device.type == "cuda" and custom_kernels:
        from tgi_server.engine.backends.attention.cuda import CudaAttention

        if CudaAttention.supports(shape, dtype):
            return CudaAttention(shape, device, dtype, kv_format)
    if device.type == "cpu" and custom_kernels:
        from tgi_server.engine.backends.attention.cpu import CpuAttention

        if CpuAttention.supports(shape, dtype):
            return CpuAttention(shape, device, dtype, kv_format)
    from tgi_server.engine.backends.attention.gather import GatherAttention

    return GatherAttention(shape, device, dtype, kv_format)
