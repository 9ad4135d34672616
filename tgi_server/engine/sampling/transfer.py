"""Copies from host to device that do not make the host wait."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` as a tensor `[len(values)]` on `device`.

    From pageable memory CUDA copies synchronously; from pinned memory the copy joins the stream.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
