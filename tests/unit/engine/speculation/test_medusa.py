"""Medusa heads in TGI's format: those that are right, those that are not, and those that do not fit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny_models import VOCAB_SIZE, make
from tests.unit.engine.requests import load_engine
from tests.unit.engine.speculation.succession import FIXED, follower, head_for, succession_llama
from tgi_server.contract import StoppingParameters
from tgi_server.engine import Engine, RunningSequence
from tgi_server.engine.driver import Driver
from tgi_server.engine.errors import InvalidWeights, UnsupportedModel
from tgi_server.engine.speculation.costs import StepCosts

HIDDEN = 64
NEW = 25


def save_heads(folder: Path, weights: dict[str, Tensor], heads: int = 3, **settings) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": heads, "medusa_num_layers": 1} | settings))
    save_file(weights, folder / "medusa_lm_head.safetensors")
    return folder


def plain_blocks(heads: int = 3) -> dict[str, Tensor]:
    """Blocks that change nothing."""
    names = [f"{head}.0.linear" for head in range(heads)]
    return {f"{name}.weight": torch.zeros(HIDDEN, HIDDEN) for name in names} | {
        f"{name}.bias": torch.zeros(HIDDEN) for name in names
    }


def _engine(folder: Path, heads: Path, **settings) -> Engine:
    engine = load_engine(folder, speculative_model=heads, **settings)
    engine.warm_up(max_batch_size=8, max_prefill_tokens=64, max_total_tokens=128)
    assert engine.speculation is not None
    engine.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})  # every draft is worth checking
    return engine


def _sequence(request_id: int, *prompt: int) -> RunningSequence:
    return RunningSequence(request_id, list(prompt), StoppingParameters(NEW, ignore_eos=True))


def test_heads_that_are_right_bring_all_their_tokens(tmp_path: Path) -> None:
    model = succession_llama(tmp_path / "model")
    outputs = {f"{head}.1.weight": head_for(model, 2 + head) for head in range(3)}
    driver = Driver(_engine(tmp_path / "model", save_heads(tmp_path / "heads", plain_blocks() | outputs)))
    assert driver.engine.info.speculate == 3
    for output, token in zip(driver.run(_sequence(1, 5, 9), _sequence(2, 50)), (9, 50), strict=True):
        assert output.tokens == [follower(token, 1 + place) for place in range(NEW)]
        drafted = [generation.drafted for generation in output.generations]
        # The first token has no hidden state before it; then each step brings four.
        assert drafted == [False, *([True, True, True, False] * NEW)[: NEW - 1]]
    assert driver.accepted == driver.drafted


def test_heads_without_an_output_have_that_of_the_model(tmp_path: Path) -> None:
    succession_llama(tmp_path / "model")
    driver = Driver(_engine(tmp_path / "model", save_heads(tmp_path / "heads", plain_blocks())))
    (output,) = driver.run(_sequence(1, 5, FIXED))
    assert output.tokens == [FIXED] * NEW
    assert driver.accepted == driver.drafted > 0


def test_heads_that_are_wrong_change_nothing_in_the_text(tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "model")
    random = {f"{head}.1.weight": torch.randn(VOCAB_SIZE, HIDDEN) for head in range(3)}
    engine = _engine(folder, save_heads(tmp_path / "heads", plain_blocks() | random))
    prompts = [[5, 9, 77], list(range(3, 60)), [8]]
    driver = Driver(engine)
    outputs = driver.run(*(_sequence(number, *prompt) for number, prompt in enumerate(prompts)))
    plain = load_engine(folder)
    plain.warm_up(max_batch_size=8, max_prefill_tokens=64, max_total_tokens=128)
    expected = Driver(plain).run(*(_sequence(number, *prompt) for number, prompt in enumerate(prompts)))
    assert [output.tokens for output in outputs] == [output.tokens for output in expected]
    assert driver.drafted > driver.accepted


def test_more_tokens_than_heads_are_refused(tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "model")
    heads = save_heads(tmp_path / "heads", plain_blocks())
    with pytest.raises(UnsupportedModel, match=r"--speculate is 4, but .*heads has 3 Medusa heads"):
        load_engine(folder, speculative_model=heads, speculate=4)
    assert _engine(folder, heads, speculate=2).info.speculate == 2


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "model")
    other = save_heads(tmp_path / "a", plain_blocks() | {"0.1.weight": torch.zeros(199, 32)})
    with pytest.raises(UnsupportedModel, match=r"0\.1\.weight has the shape \[199, 32\], but the model has a hidden"):
        load_engine(folder, speculative_model=other)
    with pytest.raises(InvalidWeights, match=r"medusa_lm_head\.safetensors has no weight '2\.0\.linear\.weight'"):
        load_engine(folder, speculative_model=save_heads(tmp_path / "b", plain_blocks(2)))
    empty = save_heads(tmp_path / "c", plain_blocks())
    (empty / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(InvalidWeights, match=r"medusa_lm_head\.safetensors cannot be read"):
        load_engine(folder, speculative_model=empty)
