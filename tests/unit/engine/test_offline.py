"""Generating for a list of prompts at once."""

import pytest
import torch

from tgi_server import demo_model
from tgi_server.contract import SamplingParameters, StoppingParameters
from tgi_server.engine import Engine, EngineConfig, offline
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.offline import generate

PROMPTS = [[1, 40, 77, 300], [1, *range(50, 90)], [1, 5], [1, *range(400, 480)], [1, 99, 98, 97, 96, 95]]
STOPPING = StoppingParameters(12, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(EngineConfig(demo_model.PATH, dtype=torch.float32))


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(None, marks=pytest.mark.slow), SamplingParameters(do_sample=True, temperature=1.5, seed=3)],
)
def test_each_prompt_gets_the_same_tokens_however_many_run_together(engine, sampling) -> None:
    alone = [generate(engine, [prompt], STOPPING, sampling)[0] for prompt in PROMPTS]
    assert all(len(tokens) == 12 for tokens in alone)
    assert generate(engine, PROMPTS, STOPPING, sampling, max_batch_size=2) == alone
    assert generate(engine, PROMPTS, STOPPING, sampling, max_prefill_tokens=40) == alone


def test_a_prompt_that_cannot_fit_is_named(engine) -> None:
    with pytest.raises(InvalidCall, match="prompt 0 may grow to 100001 tokens; at most"):
        generate(engine, [[1], [1, 2]], StoppingParameters(100_000))


def test_the_command_prints_an_answer_to_each_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["offline", "One", "Two", "--max-new-tokens=3", "--dtype=float32"])
    offline.main()
    output = capsys.readouterr().out
    assert output.startswith("One\n-> ")
    assert "\nTwo\n-> " in output
    assert "tokens in" in output.splitlines()[-1]
