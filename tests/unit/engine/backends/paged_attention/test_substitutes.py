"""The families whose attention is replaced by one on the paged cache."""

import pytest
import torch
from torch import nn

from tests.tiny_models import build
from tests.unit.engine.probed import probed
from tgi_server.engine.backends.paged_attention import bloom, falcon, gptj, mpt

SUBSTITUTES: dict[str, dict[type[nn.Module], type[nn.Module]]] = {
    "bloom": bloom.SUBSTITUTES,
    "falcon_7b": falcon.SUBSTITUTES,
    "falcon_40b": falcon.SUBSTITUTES,
    "falcon_rw": falcon.SUBSTITUTES,
    "gptj": gptj.SUBSTITUTES,
    "mpt": mpt.SUBSTITUTES,
}


@pytest.mark.parametrize("architecture", SUBSTITUTES)
@torch.inference_mode()
def test_paged_attention_has_the_logits_of_the_familys_own(architecture: str) -> None:
    """The probe compares them, and returns a shape only when they are the same."""
    model = build(architecture)
    probed(model)
    kinds = {type(module) for module in model.modules()}
    assert kinds >= set(SUBSTITUTES[architecture].values())
    assert not kinds & set(SUBSTITUTES[architecture])
