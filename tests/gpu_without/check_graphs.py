"""Steps as CUDA graphs run them, with the kernels for GPUs in the interpreter: padded, and from tensors that stay."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from tests.tiny_models import build
from tests.unit.engine.probed import by_spec
from tests.unit.engine.runners.test_no_waiting import Operations
from tgi_server.contract import StoppingParameters
from tgi_server.engine.backends.attention.base import AttentionBackend
from tgi_server.engine.backends.attention.cuda import CudaAttention
from tgi_server.engine.backends.attention.cuda_latents import LatentAttention
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.plain import PlainBackend
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.kernels.triton import split_kv
from tgi_server.engine.runners import paged, prompt_graphs
from tgi_server.engine.runners.base import PromptChunk
from tgi_server.engine.runners.paged import PagedRunner
from tgi_server.engine.sequence import RunningSequence

ROWS = 4


class Capture:
    """Computes a step again at every call. watch: records what it does."""

    def __init__(self) -> None:
        self.replayed = 0
        self.watch = False
        self.watched: list[list[Any]] = []
        self.operations: Operations | None = None

    def __call__(self, step: Callable[[], Any]) -> Callable[[], Any]:
        step()

        def replay() -> Any:
            self.replayed += 1
            if not self.watch:
                return step()
            with Operations() as self.operations:
                output = step()
            self.watched.append(self.operations.seen)
            self.operations = None
            return output

        return replay


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    capture = Capture()
    monkeypatch.setattr(prompt_graphs, "TOKEN_COUNTS", (8, 32))
    monkeypatch.setattr(split_kv, "multiprocessors", lambda device: 4)
    monkeypatch.setattr(paged, "capture_for", lambda backend: capture if backend.any_lengths else None)
    return capture


class Steps:
    """Texts of 7, 20 and 40 tokens, each with four blocks, which a runner computes.

    logits: of each step. argmax_ids: what the step has chosen, if it has.
    """

    def __init__(self, architecture: str, kind: type[AttentionBackend]) -> None:
        model = build(architecture)
        paged_model = by_spec(model)
        paged_model.attention = kind(paged_model.kv_shape, model.device, model.dtype)
        config = EngineConfig(Path("/nowhere"), cpu_memory=1 << 24, cuda_graphs=(ROWS,))
        self.runner = PagedRunner(paged_model, PlainBackend(model, config))
        self.runner.warm_up(ROWS, 64, 128, 512)
        self.logits: list[torch.Tensor] = []
        self.argmax_ids: list[torch.Tensor | None] = []
        numbers = torch.Generator().manual_seed(1)
        texts = [torch.randint(3, 199, (length,), generator=numbers).tolist() for length in (7, 20, 40)]
        self._sequences = [
            RunningSequence(i, text, StoppingParameters(9), blocks=[4 * i + 1, 4 * i + 2, 4 * i + 3, 4 * i + 4])
            for i, text in enumerate(texts)
        ]

    def step(self, decoding: int, *chunks: tuple[int, int]) -> None:
        """decoding: rows that decode. chunks: texts, and how many of their tokens are computed."""
        made = [PromptChunk.next_of(self._sequences[i], tokens) for i, tokens in chunks]
        self.logits.append(self.runner.forward(decoding, made).clone())
        self.argmax_ids.append(None if self.runner.argmax_ids is None else self.runner.argmax_ids.clone())
        self.runner.accept(0, torch.arange(5, 5 + decoding))
        for chunk in made:
            if chunk.completes:
                row = chunk.sequence.request_id
                self.runner.promote(chunk.sequence, row)
                self.runner.accept(row, torch.tensor([9 + row]))

    def run(self) -> None:
        """Prompts alone and beside rows that decode, in chunks, and more tokens than any graph has."""
        self.step(0, (0, 7))
        self.step(1, (1, 15))
        self.step(1, (1, 5), (2, 9))
        self.step(2)
        self.step(2, (2, 31))
        self.step(3)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "opt"])
@torch.inference_mode()
def test_steps_are_what_they_are_without_graphs(architecture: str, capture: Capture) -> None:
    plain, steps = (Steps(architecture, kind) for kind in (GatherAttention, CudaAttention))
    plain.run()
    assert capture.replayed == 0
    steps.run()
    assert capture.replayed == 5, "all steps but the largest"
    for actual, wanted in zip(steps.logits, plain.logits, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-3)
    chosen = [None, None, None, steps.logits[3].argmax(-1), None, steps.logits[5].argmax(-1)]
    assert [each if each is None else each.tolist() for each in steps.argmax_ids] == [
        each if each is None else each.tolist() for each in chosen
    ]


@torch.inference_mode()
def test_rows_decode_over_latents_as_without_graphs(capture: Capture) -> None:
    plain, steps = (Steps("deepseek_v3", kind) for kind in (GatherAttention, LatentAttention))
    plain.run()
    steps.run()
    assert capture.replayed == 2, "all steps without prompts"
    for actual, wanted in zip(steps.logits, plain.logits, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "opt"])
@torch.inference_mode()
def test_a_step_is_the_same_work_in_the_same_places(
    architecture: str, capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it computes: tokens of prompts, or of rows that decode."""
    steps = Steps(architecture, CudaAttention)

    def launched(executor: GridExecutor, *arguments: Any, **options: Any) -> None:
        if capture.operations is not None:
            values = (*arguments, *options.values())
            numbers = [each for each in values if not isinstance(each, torch.Tensor)]
            tensors = [each for each in values if isinstance(each, torch.Tensor)]
            capture.operations.note(f"{executor.fn.__name__} {executor.grid} {numbers}", tensors)

    monkeypatch.setattr(GridExecutor, "__call__", launched)
    capture.watch = True
    steps.step(0, (0, 7), (1, 13))
    steps.step(1, (1, 7), (2, 9))
    steps.step(2)
    steps.step(2)
    prompt, other_prompt, decode, other_decode = capture.watched
    assert prompt == other_prompt
    assert decode == other_decode
    # of prompts, and of the rows that decode beside them
    assert sum("_attend_part" in name for name, _ in prompt) == 2 * steps.runner._config.num_hidden_layers
