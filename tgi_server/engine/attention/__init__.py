"""Attention over the paged KV cache: one interface, one file per implementation."""

import torch

from tgi_server.engine.attention.base import AttentionBackend, KVShape


def create_attention_backend(
    shape: KVShape, device: torch.device, dtype: torch.dtype, *, custom_kernels: bool = True
) -> AttentionBackend:
    """Returns the fastest backend that computes the right result for this model on this device."""
    if device.type == "cuda" and custom_kernels:
        from tgi_server.engine.attention.cuda import CudaAttention

        if CudaAttention.supports(shape, dtype):
            return CudaAttention(shape, device, dtype)
    if device.type == "cpu" and custom_kernels:
        from tgi_server.engine.attention.cpu import CpuAttention

        if CpuAttention.supports(shape, dtype):
            return CpuAttention(shape, device, dtype)
    from tgi_server.engine.attention.gather import GatherAttention

    return GatherAttention(shape, device, dtype)
