import pytest
import torch

from tests.tiny_models import build
from tgi_server.engine.runners.paged_attention.gptj import SUBSTITUTES
from tgi_server.engine.runners.probe import probe_paged_path


@pytest.mark.parametrize("architecture", ["gptj"])
@torch.inference_mode()
def test_paged_attention_has_the_logits_of_the_familys_own(architecture: str) -> None:
    """The probe compares them, and returns a shape only when they are the same."""
    model = build(architecture)
    assert probe_paged_path(model) is not None
    kinds = {type(module) for module in model.modules()}
    assert kinds >= set(SUBSTITUTES.values())
    assert not kinds & set(SUBSTITUTES)
