"""The slopes of alibi against the tensors that `transformers` adds to its scores."""

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from tgi_server.engine.backends.alibi import geometric_slopes, interleaved_slopes

HEADS = [1, 2, 4, 6, 12, 16, 25, 40, 64, 71, 112]


@pytest.mark.parametrize("heads", HEADS)
def test_slopes_of_bloom_and_falcon(heads) -> None:
    biases = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
    torch.testing.assert_close(geometric_slopes(heads), biases[:, 0, 1] - biases[:, 0, 0])


@pytest.mark.parametrize("heads", HEADS)
def test_slopes_of_mpt(heads) -> None:
    biases = build_mpt_alibi_tensor(heads, 2)
    torch.testing.assert_close(interleaved_slopes(heads, bias_max=8), biases[:, 0, 1] - biases[:, 0, 0])
