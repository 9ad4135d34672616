"""Installing paged attention in a model, and taking it back."""

import pytest
import torch

from tests.tiny_models import build
from tgi_server.engine.backends.generic import install_paged_attention


def test_what_was_installed_can_be_taken_back() -> None:
    model = build("llama")
    tokens = torch.arange(5)[None]
    before = model(input_ids=tokens, use_cache=False).logits
    restore = install_paged_attention(model)
    with pytest.raises(AttributeError, match="paged_cache"):
        model(input_ids=tokens, use_cache=False)
    restore()
    torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, before)
