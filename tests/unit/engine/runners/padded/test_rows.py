"""Rows side by side and one by one: the same logits, whatever order prompts of different lengths come in."""

import pytest
import torch

from tests.tiny_models import build
from tgi_server.contract import StoppingParameters
from tgi_server.engine import RunningSequence
from tgi_server.engine.runners.base import PromptChunk
from tgi_server.engine.runners.padded.passes import CausalPasses
from tgi_server.engine.runners.padded.rows import OneByOne, Rows, SideBySide

PROMPTS = [[5, 6], list(range(10, 40)), [7], list(range(50, 75))]


@pytest.fixture(scope="module")
def passes() -> CausalPasses:
    return CausalPasses(build("codegen"))


def chunks(prompts: list[list[int]], **options) -> list[PromptChunk]:
    sequences = [RunningSequence(index, prompt, StoppingParameters(4)) for index, prompt in enumerate(prompts)]
    return [PromptChunk.next_of(sequence, sequence.remaining, **options) for sequence in sequences]


@torch.inference_mode()
def expected(passes: CausalPasses, text: list[int]) -> torch.Tensor:
    return passes.alone(RunningSequence(0, text, StoppingParameters(4)))[-1]


@pytest.mark.parametrize("kind", [SideBySide, OneByOne])
@torch.inference_mode()
def test_rows_join_decode_and_leave(kind: type[Rows], passes: CausalPasses) -> None:
    rows = kind(passes)
    computed = rows.prefill(chunks(PROMPTS))
    assert len(rows) == 0
    for logits, prompt in zip(computed, PROMPTS, strict=True):
        torch.testing.assert_close(logits[-1], expected(passes, prompt), atol=1e-3, rtol=1e-3)
    rows.commit()
    assert len(rows) == 4
    rows.select([3, 0])
    assert len(rows) == 2
    logits = rows.decode(torch.tensor([9, 8]))
    for row, text in zip(logits, ([*PROMPTS[3], 9], [*PROMPTS[0], 8]), strict=True):
        torch.testing.assert_close(row, expected(passes, text), atol=1e-3, rtol=1e-3)
    token_bytes, fixed_bytes = rows.row_bytes()
    assert token_bytes == 2 * 2 * 64 * 4 + 8
    assert fixed_bytes == 8
    rows.select([])
    assert len(rows) == 0


@torch.inference_mode()
def test_all_logits_of_a_prompt_are_its_own(passes: CausalPasses) -> None:
    rows = SideBySide(passes)
    for logits, prompt in zip(rows.prefill(chunks(PROMPTS, all_logits=True)), PROMPTS, strict=True):
        assert len(logits) == len(prompt)
