"""Hidden states of the last pass, beside those that `transformers` reports."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny_models import build, make
from tgi_server.contract import StoppingParameters
from tgi_server.engine import EngineConfig, RunningSequence
from tgi_server.engine.checkpoint.load_model import load_model
from tgi_server.engine.runners import create_runner
from tgi_server.engine.runners.base import PromptChunk
from tgi_server.engine.runners.hidden_states import HiddenStates
from tgi_server.engine.runners.paged import PagedRunner

TOKENS = [5, 9, 77, 3, 40]


@pytest.mark.parametrize("custom_kernels", [True, False])
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt_neox", marks=pytest.mark.slow)])
def test_they_are_those_of_transformers(name: str, custom_kernels: bool, tmp_path: Path) -> None:
    folder = make(name, tmp_path, num_hidden_layers=4)
    config = EngineConfig(folder, dtype=torch.float32, custom_kernels=custom_kernels)
    model = load_model(config, torch.device("cpu"))
    runner = create_runner(model, config)
    assert isinstance(runner, PagedRunner)
    states = runner.hidden_states = HiddenStates((3, 1))
    runner.warm_up(4, 64, 64, None)
    sequence = RunningSequence(1, TOKENS, StoppingParameters(4), blocks=[1])
    with torch.inference_mode():
        runner.forward(0, [PromptChunk.next_of(sequence, len(TOKENS))])
        expected = build(name, num_hidden_layers=4)(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    assert states.head is not None
    assert torch.allclose(states.head, expected[-1][0, -1:], atol=1e-4)
    for layer, place in ((1, 0), (3, 1)):
        kept = states.layers[place]
        assert torch.allclose(kept, expected[layer][0], atol=1e-4)


def test_a_step_that_runs_again_without_python_leaves_its_own() -> None:
    states = HiddenStates((1,))

    def capture(step):
        output = step()
        return lambda: output  # as a graph, which computes into the tensors of the capture

    def step(tokens: int) -> Tensor:
        states.keep([torch.ones(tokens, 8), torch.zeros(tokens, 8)])
        return torch.ones(tokens, 99)

    short, long = (states.capturing(capture)(lambda tokens=tokens: step(tokens)) for tokens in (1, 4))  # type: ignore
    for replay, tokens in ((short, 1), (long, 4), (short, 1)):
        assert len(replay()) == tokens
        assert states.head is not None
        assert [len(each) for each in (states.head, *states.layers)] == [tokens, tokens]
