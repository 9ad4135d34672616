"""The slopes of alibi against the tensors that `transformers` adds to its scores."""

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from tests.tiny_models import build
from tgi_server.engine.runners.families import install_paged_attention
from tgi_server.engine.runners.families.alibi import geometric_slopes, interleaved_slopes

HEADS = [1, 2, 4, 6, 12, 16, 25, 40, 64, 71, 112]


@pytest.mark.parametrize("heads", HEADS)
def test_slopes_of_bloom_and_falcon(heads) -> None:
    biases = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
    torch.testing.assert_close(geometric_slopes(heads), biases[:, 0, 1] - biases[:, 0, 0])


@pytest.mark.parametrize("heads", HEADS)
def test_slopes_of_mpt(heads) -> None:
    biases = build_mpt_alibi_tensor(heads, 2)
    torch.testing.assert_close(interleaved_slopes(heads, bias_max=8), biases[:, 0, 1] - biases[:, 0, 0])


@pytest.mark.parametrize("architecture", ["bloom", "falcon_7b", "gptj", "llama", "mpt"])
def test_what_was_installed_can_be_taken_back(architecture) -> None:
    model = build(architecture)
    tokens = torch.arange(5)[None]
    before = model(input_ids=tokens, use_cache=False).logits
    restore = install_paged_attention(model)
    with pytest.raises(AttributeError, match="paged_cache"):
        model(input_ids=tokens, use_cache=False)
    restore()
    torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, before)
