"""Marks and facts that the tests of this folder share."""

import pytest
import torch

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# `transformers` multiplies the experts of these by `grouped_mm`.
MIXTURES = {"gpt_oss", "mixtral", "qwen3_moe"}
_WITHOUT_WAITING = {(9, 0), (10, 0)}


def mixture_waits(dtype: torch.dtype) -> bool:
    """Returns True if torch's `grouped_mm` lets the host wait for the device here, so that nothing is recorded."""
    return dtype is not torch.bfloat16 or torch.cuda.get_device_capability() not in _WITHOUT_WAITING
