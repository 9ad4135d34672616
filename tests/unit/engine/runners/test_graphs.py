"""Steps that are padded to the size of a captured one; what captures them on a GPU stands aside here."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import make
from tests.unit.engine.lora.adapted import make_adapted
from tests.unit.engine.requests import Requests, expected_tokens, load_engine, prompts
from tests.unit.engine.runners.test_parity import check, overlap, run_overlapping
from tgi_server.contract import ReportParameters, SamplingParameters, StoppingParameters
from tgi_server.engine import Engine, RunningSequence
from tgi_server.engine.backends.attention.cpu import CpuAttention
from tgi_server.engine.driver import Driver
from tgi_server.engine.runners import paged, prompt_graphs
from tgi_server.engine.runners.graphs import DecodeGraphs, graph_batch_sizes, try_capture
from tgi_server.engine.runners.prompt_graphs import TOKEN_COUNTS, PromptGraphs, graph_token_counts
from tgi_server.engine.sampling import cpu_sampler
from tgi_server.engine.speculation.costs import StepCosts

WANTED = [
    SamplingParameters(),
    SamplingParameters(do_sample=True, temperature=0.8, top_p=0.9, seed=3),
    SamplingParameters(repetition_penalty=1.3),
]


class Capture:
    """Computes a step again at every call, and like a graph, returns the same tensors every time.

    steps, replayed: rows of the first tensor of each step, and of each call.
    """

    def __init__(self) -> None:
        self.replayed: list[int] = []
        self.steps: list[int] = []

    def __call__(self, step):
        output = step()
        self.steps.append(len(output[0]))

        def replay():
            self.replayed.append(len(output[0]))
            for old, new in zip(output, step(), strict=True):
                assert old.data_ptr() == new.data_ptr()
            return output

        return replay


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    capture = Capture()
    monkeypatch.setattr(paged, "capture_for", lambda backend: capture)
    return capture


@pytest.mark.parametrize(
    "architecture",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bloom_6_heads", "gemma2", "opt", "starcoder")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("falcon_h1", "jamba", "lfm2", "qwen3_next")),
    ],
)
@pytest.mark.parametrize("custom_kernels", [True, False])
def test_padded_steps_give_the_tokens_of_transformers(architecture, custom_kernels, capture, tmp_path: Path) -> None:
    requests, expected = overlap(make(architecture, tmp_path), custom_kernels=custom_kernels, cuda_graphs=(4, 12, 999))
    check(requests, expected)
    assert {4, 12} <= set(capture.replayed), "both were used"
    assert max(capture.replayed) == 12, "no larger one than there are rows"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_captured_steps_go_on_to_be_right_when_adapters_come_and_go(architecture, capture, tmp_path: Path) -> None:
    model = make_adapted(make(architecture, tmp_path / "model"))
    engine = load_engine(model.folder, cuda_graphs=(4, 12))
    model.load(engine, "a0", "a1")
    requests = Requests(engine, prompts(), adapters=model.ids())
    assert len(capture.steps) == 2 * 2 * 2, "of two sizes, with adapters and without, before and after the cache"
    model.load(engine, "a2", "a3", "a4")
    run_overlapping(requests)
    check(requests, model.expected())
    assert {4, 12} <= set(capture.replayed), "both were used"


@pytest.fixture
def few_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has steps with prompts captured for some numbers of tokens, as where attention is the same for all lengths."""
    monkeypatch.setattr(CpuAttention, "any_prompts", True)
    monkeypatch.setattr(prompt_graphs, "TOKEN_COUNTS", (24, 64))


@pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bloom", "gemma2", "opt"))]
)
def test_padded_steps_with_prompts_give_the_tokens_of_transformers(
    architecture, few_token_counts, capture, tmp_path: Path
) -> None:
    folder, texts = make(architecture, tmp_path), prompts()
    requests = Requests(load_engine(folder, cuda_graphs=(16,)), texts)
    assert capture.steps[:3] == [16, 16, 16], "rows that decode, and the last tokens of prompts"
    eager = _eager_passes(requests.engine)
    run_overlapping(requests)
    check(requests, expected_tokens(folder, texts))
    assert len(capture.replayed) > len(eager) > 0
    assert min(eager) > 64, "what a captured step has room for is not computed in another way"


@pytest.mark.slow
def test_steps_with_prompts_in_which_rows_have_adapters_are_not_captured(
    few_token_counts, capture, tmp_path: Path
) -> None:
    model = make_adapted(make("llama", tmp_path / "model"))
    engine = load_engine(model.folder, cuda_graphs=(4, 12))
    model.load(engine, "a0", "a1", "a2", "a3", "a4")
    requests = Requests(engine, prompts(), adapters=model.ids())
    eager = _eager_passes(engine)
    run_overlapping(requests)
    check(requests, model.expected())
    assert eager


@pytest.mark.parametrize("speculate", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_whatever_a_request_wants_it_gets_from_captured_steps(
    speculate: int, few_token_counts, capture, tmp_path: Path
) -> None:
    """Rows that sample, with penalties, or with reports, beside greedy ones; with drafts beside prompts and without."""
    folder = make("llama", tmp_path)
    speculation = {"speculate": speculate, "speculative_model": folder} if speculate else {}
    engine, plain = (load_engine(folder, cuda_graphs=sizes, **speculation) for sizes in ((4, 8), ()))
    outputs = []
    for each in (engine, plain):
        each.warm_up(max_batch_size=8, max_prefill_tokens=32, max_total_tokens=64)
        if each.speculation is not None:
            each.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})  # every draft is worth checking
        driver = Driver(each, max_prefill_tokens=32)
        for index, text in enumerate(prompts((9, 20, 5, 12, 7, 3))):
            driver.add(
                RunningSequence(
                    index,
                    text,
                    StoppingParameters(10, ignore_eos=True),
                    WANTED[index % len(WANTED)],
                    ReportParameters(logprobs=index % 2 == 1, top_n_tokens=index % 3, prefill_logprobs=index == 3),
                )
            )
            driver.step()
        driver.run()
        outputs.append([output.generations for output in driver.outputs.values()])
    assert capture.replayed
    captured, expected = outputs
    for one, other in zip(captured, expected, strict=True):
        assert [each.token_id for each in one] == [each.token_id for each in other]
        assert [each.logprob for each in one] == pytest.approx([each.logprob for each in other], abs=1e-4)


def test_the_next_inputs_of_greedy_rows_are_chosen_in_the_recorded_step(
    capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = load_engine(make("llama", tmp_path), cuda_graphs=(4,))
    engine.warm_up(max_batch_size=4, max_prefill_tokens=64, max_total_tokens=64)
    sequences = [
        RunningSequence(block, text, StoppingParameters(9, ignore_eos=True), blocks=[block])
        for block, text in enumerate(prompts((9, 7, 20)), start=1)
    ]
    engine.step(1, sequences, [(each.request_id, len(each.input_ids)) for each in sequences]).collect()
    monkeypatch.setattr(cpu_sampler, "argmax", None)  # nobody looks for the largest logits after the step
    batch: Any = engine._runner._batch  # type: ignore[attr-defined]
    for position in range(1, 4):
        chosen = [generation.token_id for generation in engine.step(1).collect().generations]
        assert batch.tokens[:3].tolist() == chosen
        assert batch.positions.tolist() == [9 + position, 7 + position, 20 + position, 0]


def _eager_passes(engine: Engine) -> list[int]:
    """Returns a list to which each pass that is not captured will add its tokens."""
    seen: list[int] = []
    runner: Any = engine._runner
    forward = runner.model.forward

    def watched(inputs):
        seen.append(len(inputs.tokens))
        return forward(inputs)

    runner.model.forward = watched
    return seen


def test_rows_that_were_left_write_nowhere(capture, tmp_path: Path) -> None:
    """Their blocks have gone to another sequence, whose steps they pad."""
    engine = load_engine(make("llama", tmp_path), cuda_graphs=(8,))
    engine.warm_up(max_batch_size=8, max_prefill_tokens=64, max_total_tokens=64)
    first, second, third = prompts((9, 7, 20))
    alone = _run(engine, {2: third})
    _run(engine, {1: first, 2: second})
    assert _run(engine, {2: third}) == alone
    assert set(capture.replayed) == {8}
    assert len(capture.replayed) > 10


@pytest.mark.parametrize("custom_kernels", [True, False])
def test_steps_with_drafts_are_padded_as_well(custom_kernels: bool, capture, tmp_path: Path) -> None:
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
    """Returns a list to which each captured pass with drafts will add its tokens."""
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
    assert graph_batch_sizes(None, 1000)[-2:] == [480, 512]
    assert graph_batch_sizes((16, 2, 2, 0), 8) == [2]
    assert graph_batch_sizes((), 8) == []


def test_graph_token_counts_go_up_to_the_largest_step_and_pad_no_more_than_a_third() -> None:
    assert graph_token_counts(8) == [8]
    assert graph_token_counts(40) == [16, 24, 32, 40]
    assert graph_token_counts(5000) == list(TOKEN_COUNTS)
    assert all(larger - smaller <= larger / 3 for smaller, larger in pairwise(TOKEN_COUNTS))


def test_a_step_takes_the_next_larger_graph_or_none() -> None:
    graphs = DecodeGraphs([2, 8], lambda rows: (torch.zeros(rows, 5), torch.arange(rows)), Capture())
    outputs = [graphs.run(rows) for rows in (1, 2, 3, 8)]
    assert [tuple(map(len, output)) for output in outputs] == [(1, 1), (2, 2), (3, 3), (8, 8)]
    assert outputs[2][1].tolist() == [0, 1, 2]
    assert len({output[0].data_ptr() for output in outputs}) == 1, "there is one tensor for the logits of all"
    assert graphs.run(9) is None


def test_what_cannot_be_recorded_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> None:
        raise RuntimeError("called a synchronizing CUDA operation\nat length")

    assert try_capture(make, "decoding") == (None, "called a synchronizing CUDA operation")
    assert caplog.messages == ["decoding runs without CUDA graphs: called a synchronizing CUDA operation"]


def test_a_model_that_cannot_be_recorded_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(step) -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(paged, "capture_for", lambda backend: refuse)
    engine = load_engine(make("llama", tmp_path))
    engine.warm_up(max_batch_size=2, max_prefill_tokens=16, max_total_tokens=32)
    assert engine.fallbacks == ("decoding runs without CUDA graphs: called a synchronizing CUDA operation",)


def test_steps_with_prompts_that_cannot_be_recorded_leave_decoding_as_it_is(
    few_token_counts, capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(PromptGraphs, "_input", refuse)
    engine = load_engine(make("llama", tmp_path))
    engine.warm_up(max_batch_size=2, max_prefill_tokens=16, max_total_tokens=32)
    assert engine.fallbacks == ("computing prompts runs without CUDA graphs: called a synchronizing CUDA operation",)
    assert len(_run(engine, {1: prompts((9,))[0]})) == 6
    assert capture.replayed


def test_a_cpu_that_is_told_to_record_says_so(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    load_engine(make("llama", tmp_path), cuda_graphs=(4,))
    assert "--cuda-graphs has no effect: decoding on a CPU runs without CUDA graphs" in caplog.messages
