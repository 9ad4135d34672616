"""Copies from host to device that do not make the host wait."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` as a tensor `[len(values)]` on `device`."""
    return copy_to_device(torch.tensor(values, dtype=dtype), device)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, which is on the host, on `device`; on a CPU it may be the same one.

    From pageable memory CUDA copies synchronously; from pinned memory the copy joins the stream.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
