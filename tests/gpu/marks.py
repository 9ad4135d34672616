"""What the tests of this folder share."""

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def needs_gpu() -> pytest.MarkDecorator:
    """Returns the mark of a file of tests. Without a GPU the whole file is skipped: nothing else in it is collected."""
    if not torch.cuda.is_available():
        pytest.skip("all of tests/gpu: needs a CUDA device", allow_module_level=True)
    return pytest.mark.gpu
