"""Steps that are padded to the number of rows of a recorded one; what records them on a GPU stands aside here."""

from pathlib import Path

import pytest
import torch

from tests.tiny_models import make
from tests.unit.engine.adapters.adapted import make_adapted
from tests.unit.engine.requests import Requests, load_engine, prompts
from tests.unit.engine.runners.test_parity import check, overlap, run_overlapping
from tgi_server.contract import StoppingParameters
from tgi_server.engine import Engine, RunningSequence
from tgi_server.engine.driver import Driver
from tgi_server.engine.runners import paged
from tgi_server.engine.runners.graphs import DecodeGraphs, graph_batch_sizes, record_decoding
from tgi_server.engine.speculation.costs import StepCosts


class Recorder:
    """Computes a step anew at every call, and like a graph, into the tensor that it returned before."""

    def __init__(self) -> None:
        self.replayed: list[int] = []
        self.steps: list[int] = []

    def __call__(self, step):
        output = step().clone()
        self.steps.append(len(output))

        def replay() -> torch.Tensor:
            self.replayed.append(len(output))
            return output.copy_(step())

        return replay


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(paged, "recorder_for", lambda backend: recorder)
    return recorder


@pytest.mark.parametrize(
    "architecture",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bloom_6_heads", "gemma2", "opt", "starcoder")),
    ],
)
@pytest.mark.parametrize("custom_kernels", [True, False])
def test_padded_steps_give_the_tokens_of_transformers(architecture, custom_kernels, recorder, tmp_path: Path) -> None:
    requests, expected = overlap(make(architecture, tmp_path), custom_kernels=custom_kernels, cuda_graphs=(4, 12, 999))
    check(requests, expected)
    assert {4, 12} <= set(recorder.replayed), "both were used"
    assert max(recorder.replayed) == 12, "no larger one than there are rows"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_recorded_steps_go_on_to_be_right_when_adapters_come_and_go(architecture, recorder, tmp_path: Path) -> None:
    model = make_adapted(make(architecture, tmp_path / "model"))
    engine = load_engine(model.folder, cuda_graphs=(4, 12))
    model.load(engine, "a0", "a1")
    requests = Requests(engine, prompts(), adapters=model.ids())
    assert len(recorder.steps) == 2 * 2 * 2, "of two sizes, with adapters and without, before and after the cache"
    model.load(engine, "a2", "a3", "a4")
    run_overlapping(requests)
    check(requests, model.expected())
    assert {4, 12} <= set(recorder.replayed), "both were used"


def test_rows_that_were_left_write_nowhere(recorder, tmp_path: Path) -> None:
    """Their blocks have gone to another sequence, whose steps they pad."""
    engine = load_engine(make("llama", tmp_path), cuda_graphs=(8,))
    engine.warm_up(max_batch_size=8, max_prefill_tokens=64, max_total_tokens=64)
    first, second, third = prompts((9, 7, 20))
    alone = _run(engine, {2: third})
    _run(engine, {1: first, 2: second})
    assert _run(engine, {2: third}) == alone
    assert set(recorder.replayed) == {8}
    assert len(recorder.replayed) > 10


@pytest.mark.parametrize("custom_kernels", [True, False])
def test_steps_with_drafts_are_padded_as_well(custom_kernels: bool, recorder, tmp_path: Path) -> None:
    """Each row has as many drafted tokens as there may be; where there are fewer, nothing comes of the others."""
    folder = make("llama", tmp_path)
    texts = prompts((9, 33, 20))
    plain, engine = (
        load_engine(folder, custom_kernels=custom_kernels, cuda_graphs=(4,), **settings)
        for settings in ({}, {"speculate": 3, "speculative_model": folder})
    )
    for each in (plain, engine):
        each.warm_up(max_batch_size=4, max_prefill_tokens=64, max_total_tokens=64)
    assert engine.speculation is not None
    engine.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})  # every draft is worth checking
    replayed = _speculation_passes(engine)
    # Drafts of different lengths: at the end of a reply there is room for fewer.
    news = (13, 20, 11)
    outputs, expected = (
        [output.tokens for output in driver.run(*_sequences(texts, news))] for driver in (Driver(engine), Driver(plain))
    )
    assert outputs == expected
    assert len(replayed) > 2


def _speculation_passes(engine: Engine) -> list[int]:
    """Returns a list to which each recorded pass with drafts will add its tokens."""
    seen: list[int] = []
    runner, forward = engine._runner, engine._runner.forward_drafts

    def watched(decoding, drafts):
        logits = forward(decoding, drafts)
        if logits is not None:
            seen.append(len(logits))
        return logits

    runner.forward_drafts = watched  # type: ignore[method-assign]
    return seen


def _sequences(texts: list[list[int]], news: tuple[int, ...]) -> list[RunningSequence]:
    return [
        RunningSequence(index, text, StoppingParameters(new, ignore_eos=True))
        for index, (text, new) in enumerate(zip(texts, news, strict=True))
    ]


def _run(engine: Engine, prompt_of_block: dict[int, list[int]]) -> list[int]:
    """The tokens of all sequences, each of which has one block."""
    stopping = StoppingParameters(6, ignore_eos=True)
    sequences = [RunningSequence(block, prompt, stopping, blocks=[block]) for block, prompt in prompt_of_block.items()]
    step = engine.step(1, sequences, [(sequence.request_id, len(sequence.input_ids)) for sequence in sequences])
    tokens: list[int] = []
    while True:
        tokens += [generation.token_id for generation in step.collect().generations]
        if not engine.batch:
            return tokens
        step = engine.step(1)


def test_graph_batch_sizes_go_up_to_the_number_of_rows() -> None:
    assert graph_batch_sizes(None, 1) == [1]
    assert graph_batch_sizes(None, 40) == [1, 2, 4, 8, 16, 32, 40]
    assert graph_batch_sizes(None, 1000)[-2:] == [224, 256]
    assert graph_batch_sizes((16, 2, 2, 0), 8) == [2]
    assert graph_batch_sizes((), 8) == []


def test_a_step_takes_the_next_larger_graph_or_none() -> None:
    graphs = DecodeGraphs([2, 8], lambda rows: torch.arange(rows), lambda step: step)
    assert [len(graphs.run(rows)) for rows in (1, 2, 3, 8)] == [1, 2, 3, 8]
    assert graphs.run(9) is None


def test_what_cannot_be_recorded_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    def step(rows: int) -> torch.Tensor:
        raise RuntimeError("called a synchronizing CUDA operation\nat length")

    assert record_decoding([2], step, Recorder()) == (None, "called a synchronizing CUDA operation")
    assert caplog.messages == ["decoding runs without CUDA graphs: called a synchronizing CUDA operation"]


def test_a_model_that_cannot_be_recorded_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(step) -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(paged, "recorder_for", lambda backend: refuse)
    engine = load_engine(make("llama", tmp_path))
    engine.warm_up(max_batch_size=2, max_prefill_tokens=16, max_total_tokens=32)
    assert engine.fallbacks == ("decoding runs without CUDA graphs: called a synchronizing CUDA operation",)


def test_a_cpu_that_is_told_to_record_says_so(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    load_engine(make("llama", tmp_path), cuda_graphs=(4,))
    assert "--cuda-graphs has no effect: decoding on a CPU runs without CUDA graphs" in caplog.messages
