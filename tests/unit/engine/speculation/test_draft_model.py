"""Drafts of a small model beside a large one, of random weights: they write what the large one writes alone."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.tiny_models import make, make_llama
from tests.unit.engine.requests import load_engine
from tgi_server.contract import StoppingParameters
from tgi_server.engine import Engine, RunningSequence
from tgi_server.engine.driver import Driver
from tgi_server.engine.errors import NotEnoughMemory, UnsupportedModel
from tgi_server.engine.speculation.costs import StepCosts
from tgi_server.engine.speculation.draft_model import DraftModel

NEW = 24
PROMPTS = [[5, 9, 77], list(range(3, 60)), [8], [40, 41, 42, 43] * 9]
FREE = StepCosts({1: 1.0}, {1: 1.0})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama"))


def _engine(folder: Path, draft: Path, **settings) -> Engine:
    engine = load_engine(folder, speculative_model=draft, **settings)
    engine.warm_up(max_batch_size=8, max_prefill_tokens=256, max_total_tokens=128)
    assert engine.speculation is not None
    engine.speculation.costs = FREE  # every draft is worth checking
    return engine


def _sequences() -> list[RunningSequence]:
    return [RunningSequence(i, prompt, StoppingParameters(NEW, ignore_eos=True)) for i, prompt in enumerate(PROMPTS)]


def _plain(folder: Path) -> list[list[int]]:
    engine = load_engine(folder)
    engine.warm_up(max_batch_size=8, max_prefill_tokens=256, max_total_tokens=128)
    return [output.tokens for output in Driver(engine).run(*_sequences())]


def test_a_model_that_drafts_for_itself_is_always_right(folder: Path) -> None:
    engine = _engine(folder, folder, speculate=5)
    driver = Driver(engine)
    outputs = driver.run(*_sequences())
    assert [output.tokens for output in outputs] == _plain(folder)
    assert driver.accepted == driver.drafted > 0
    drafted = sum(generation.drafted for generation in outputs[0].generations)
    assert drafted == 5 * NEW // 6  # five drafted tokens for one of its own


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama", {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 230}),
        pytest.param("opt", {}, marks=pytest.mark.slow),
        pytest.param("llama_head_dim_24", {}, marks=pytest.mark.slow),
    ],
)
def test_another_model_changes_nothing_in_the_text(folder: Path, tmp_path: Path, name: str, overrides: dict) -> None:
    driver = Driver(_engine(folder, make(name, tmp_path, **overrides), speculate=3))
    assert [output.tokens for output in driver.run(*_sequences())] == _plain(folder)
    assert driver.drafted > driver.accepted


@pytest.mark.slow
def test_attention_in_plain_torch_takes_the_blocks_of_the_other_model(folder: Path, tmp_path: Path) -> None:
    large = make("llama_head_dim_24", tmp_path)  # in blocks of 16 tokens, if it were alone
    engine = _engine(large, folder, speculate=3)
    assert engine.info.block_size == load_engine(folder).info.block_size
    driver = Driver(engine)
    assert [output.tokens for output in driver.run(*_sequences())] == _plain(large)


def test_without_a_number_four_tokens_are_drafted(folder: Path) -> None:
    assert _engine(folder, folder).info.speculate == 4


def test_a_long_prompt_is_caught_up_with_in_several_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tgi_server.engine.speculation.draft_model.CATCH_UP_TOKENS", 20)
    driver = Driver(_engine(folder, folder, speculate=5))
    (output,) = driver.run(RunningSequence(1, PROMPTS[1], StoppingParameters(NEW, ignore_eos=True)))
    assert output.tokens == _plain(folder)[1]
    assert [generation.drafted for generation in output.generations][:3] == [False, False, True]
    assert driver.accepted == driver.drafted > 0


def test_a_prompt_that_others_had_is_not_computed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(folder, folder, speculate=5)
    driver = Driver(engine)
    blocks = list(range(1, 5))
    (first,) = driver.run(RunningSequence(1, PROMPTS[1], StoppingParameters(NEW, ignore_eos=True), blocks=blocks))
    chunks: list[int] = []
    drafter = engine.speculation.drafters[-1] if engine.speculation else None
    assert isinstance(drafter, DraftModel)
    forward = drafter._runner.forward

    def counted(decoding, chunks_, *arguments):
        chunks.extend(len(chunk.tokens) for chunk in chunks_)
        return forward(decoding, chunks_, *arguments)

    monkeypatch.setattr(drafter._runner, "forward", counted)
    again = RunningSequence(
        2, PROMPTS[1], StoppingParameters(NEW, ignore_eos=True), blocks=blocks, computed=len(PROMPTS[1]) - 1
    )
    (second,) = driver.run(again)
    assert second.tokens == first.tokens
    assert max(chunks) <= 6
    assert driver.accepted == driver.drafted


def test_a_draft_that_costs_more_than_it_brings_is_not_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(folder, folder, speculate=3)
    assert engine.speculation is not None
    drafter = engine.speculation.drafters[-1]
    assert isinstance(drafter, DraftModel)
    drafter._costs = StepCosts({1: 5.0}, {1: 5.0})
    driver = Driver(engine)
    outputs = driver.run(*_sequences())
    assert [output.tokens for output in outputs] == _plain(folder)
    assert driver.drafted == 0


def test_both_caches_fit_into_the_memory(folder: Path) -> None:
    """On a CPU, wherever the tests run: a GPU's memory cannot be limited to what shows it."""
    cpu = torch.device("cpu")
    alone = load_engine(folder, device=cpu, cpu_memory=1 << 20)
    drafted = load_engine(folder, device=cpu, cpu_memory=1 << 20, speculative_model=folder)
    blocks = [each.warm_up(64, 256).num_blocks for each in (alone, drafted)]
    assert blocks[1] == blocks[0] // 2
    few = load_engine(folder, device=cpu, cpu_memory=1 << 16, speculative_model=folder)
    with pytest.raises(NotEnoughMemory, match=r"tokens, in the model and in the one that drafts, but one sequence"):
        few.warm_up(4, 64, max_total_tokens=256)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    large, small = make_llama(tmp_path / "large"), make_llama(tmp_path / "small")
    tokenizer = small / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"<pad>"', '"<filler>"'))
    with pytest.raises(UnsupportedModel, match=r"token 0 is '<filler>' there and '<pad>' here; name a draft model"):
        load_engine(large, speculative_model=small)
    tokenizer.unlink()
    with pytest.raises(UnsupportedModel, match=r"small has no tokenizer"):
        load_engine(large, speculative_model=small)
    shutil.copyfile(large / "tokenizer.json", tokenizer)
    assert load_engine(large, speculative_model=small).info.speculate == 4


def test_a_model_in_padded_batches_cannot_draft(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"mamba models run in padded batches and cannot draft; name another"):
        load_engine(folder, speculative_model=make("mamba", tmp_path))
    with pytest.raises(UnsupportedModel, match="leave out --speculative-model"):
        load_engine(tmp_path, speculative_model=folder)
