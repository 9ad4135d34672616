"""The families whose attention is replaced by one on the paged cache."""

import pytest
import torch
from torch import nn

from tests.tiny_models import build
from tgi_server.engine.runners.paged_attention import bloom, falcon, gptj, mpt
from tgi_server.engine.runners.probe import probe_paged_path

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
    assert probe_paged_path(model) is not None
    kinds = {type(module) for module in model.modules()}
    assert kinds >= set(SUBSTITUTES[architecture].values())
    assert not kinds & set(SUBSTITUTES[architecture])
