"""What the tests of this folder share."""

import pytest
import torch

NEEDS_GPU = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
