"""A spec in plain torch computes what the model of `transformers` does, whatever its layers are made of."""

import pytest
import torch

from tests.tiny_models import build
from tests.unit.engine.backends.test_cpu import IN_ONE_CALL
from tests.unit.engine.probed import by_spec
from tgi_server.engine.backends.own_pass import own_pass, probe_tokens
from tgi_server.engine.backends.probe import LogitsProbe, long_logits
from tgi_server.engine.proofs import logits_error

LENGTH = 60
# Positions whose logits `long_logits` returns.
ENDS = [LENGTH // 2 - 1, LENGTH // 3 - 1, LENGTH // 3, LENGTH - 2, LENGTH - 1, LENGTH // 3 + 1]


@pytest.mark.parametrize("architecture", IN_ONE_CALL)
@torch.inference_mode()
def test_chunks_and_rows_that_decode_have_the_logits_of_a_whole_text(architecture: str) -> None:
    model = build(architecture)
    expected = model(input_ids=probe_tokens(model, LENGTH)[None], use_cache=False).logits[0, ENDS]
    reference = by_spec(model)
    reference.allocate(2 * -(-LENGTH // 16) + 1)
    assert logits_error(long_logits(reference, LENGTH), expected) < 2e-5


@pytest.mark.parametrize("architecture", ["gemma3n_text", "kimi_linear", "llama", "nemotron_h", "olmo_hybrid"])
@torch.inference_mode()
def test_it_is_right_in_bfloat16(architecture: str) -> None:
    model = build(architecture).bfloat16()
    expected = own_pass(model).logits
    reference = by_spec(model)
    assert LogitsProbe(reference, expected=expected).fault(reference, "its spec") is None
