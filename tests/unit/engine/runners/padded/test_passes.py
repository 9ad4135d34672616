"""Forward passes over padded batches, against the same texts computed at once and alone."""

import pytest
import torch

from tests.tiny_models import build
from tgi_server.contract import StoppingParameters
from tgi_server.engine import RunningSequence
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.runners.padded.passes import CausalPasses, Passes, Seq2SeqPasses

PROMPTS = [list(range(20, 31)), [5, 6, 7]]


def sequence(prompt: list[int], generated: list[int]) -> RunningSequence:
    return RunningSequence(1, prompt, StoppingParameters(4), generated_ids=generated)


@pytest.mark.parametrize(("architecture", "kind"), [("codegen", CausalPasses), ("flan_t5", Seq2SeqPasses)])
@torch.inference_mode()
def test_a_text_in_steps_has_the_logits_of_the_whole_text(architecture: str, kind: type[Passes]) -> None:
    passes = kind(build(architecture))
    batch, first = passes.prefill([sequence(prompt, [9]) for prompt in PROMPTS], all_logits=False, joinable=True)
    second = passes.decode(batch, torch.tensor([10, 11]))
    for row, (prompt, token) in enumerate(zip(PROMPTS, (10, 11), strict=True)):
        whole = passes.alone(sequence(prompt, [9, token]))
        assert len(whole) == 3
        torch.testing.assert_close(first[row, -1], whole[1], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(second[row], whole[2], atol=1e-3, rtol=1e-3)


def test_a_decoder_needs_a_token_to_start_with() -> None:
    model = build("flan_t5")
    model.generation_config.decoder_start_token_id = None
    with pytest.raises(UnsupportedModel, match="this t5 model has no decoder_start_token_id"):
        Seq2SeqPasses(model)
