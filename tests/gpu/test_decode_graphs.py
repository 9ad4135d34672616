"""Captured steps: the same tokens as without, and nothing in them that the host waits for."""

import logging

import pytest
import torch

from tests.gpu.marks import NEEDS_GPU
from tests.tiny_models import ARCHITECTURES, ONE_BY_ONE, PLAIN_ON_GPUS, make
from tests.unit.engine.requests import generate_together, load_engine, prompts
from tests.unit.engine.runners.test_parity import ELSEWHERE, PADDED
from tgi_server.contract import StoppingParameters
from tgi_server.engine import Engine, RunningSequence

pytestmark = NEEDS_GPU

STEPS = {"decoding", "computing prompts"}


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - ELSEWHERE - PADDED))
def test_the_same_tokens_with_graphs_and_without(architecture, tmp_path, caplog) -> None:
    folder = make(architecture, tmp_path)
    without = generate_together(load_engine(folder, cuda_graphs=()), prompts())
    assert not _captured(caplog)
    engine = load_engine(folder)
    captured = generate_together(engine, prompts())
    assert _captured(caplog) == _expected(architecture), caplog.messages
    assert _uncaptured(engine) == ({"decoding"} if architecture in PLAIN_ON_GPUS else STEPS - _expected(architecture))
    assert captured == without


def test_a_model_that_waits_runs_without(tmp_path) -> None:
    """`transformers` looks at the tokens of a GPT-2 that has a padding token."""
    folder = make("gpt2", tmp_path)
    engine = load_engine(folder, custom_kernels=False)
    tokens = generate_together(engine, prompts())
    assert "decoding" in _uncaptured(engine)
    assert tokens == generate_together(load_engine(folder, cuda_graphs=()), prompts())


@pytest.mark.parametrize("architecture", ["gpt_oss", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixtures_are_recorded_in_half_precision(architecture, dtype, tmp_path, caplog) -> None:
    """By torch's grouped product where it is one kernel, and otherwise by the engine's own."""
    engine = load_engine(make(architecture, tmp_path), dtype=dtype)
    assert all(map(len, generate_together(engine, prompts())))
    assert _captured(caplog) == STEPS, caplog.messages
    assert engine.fallbacks == ()


@pytest.mark.parametrize("graphs", [None, ()])
def test_steps_are_started_without_waiting_for_the_device(graphs, tmp_path) -> None:
    """Prompts in chunks beside running sequences, blocks granted, a sequence that leaves: nothing of it waits."""
    engine = load_engine(make("llama", tmp_path), cuda_graphs=graphs)
    engine.warm_up(max_batch_size=4, max_prefill_tokens=64, max_total_tokens=128)
    first, second = prompts((20, 40))
    started = []
    stopping = StoppingParameters(60, ignore_eos=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        started.append(engine.step(1, [RunningSequence(1, first, stopping, blocks=[1])], [(1, 20)]))
        started.append(engine.step(1, [RunningSequence(2, second, stopping, blocks=[3, 4])], [(2, 30)]))
        started.append(engine.step(1, [], [(2, 10)], grants=[(1, [2])]))
        started += [engine.step(1) for _ in range(12)]
        engine.keep(1, [2])
        started.append(engine.step(1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    counts = [len(step.collect().generations) for step in started]
    assert counts[-1] == 1
    assert sum(counts) > 20


@pytest.mark.whole_gpu
def test_what_is_left_of_the_memory_is_enough_for_the_graphs(tmp_path) -> None:
    """Nothing is left but what `--cuda-memory-fraction` leaves, and yet a large step can be computed."""
    settings = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}
    engine = load_engine(make("llama", tmp_path, **settings), dtype=torch.bfloat16)
    engine.warm_up(max_batch_size=256, max_prefill_tokens=4096, max_total_tokens=1 << 20)
    free, total = torch.cuda.mem_get_info()
    assert 0.01 * total < free < 0.25 * total
    (text,) = prompts((100,))
    sequence = RunningSequence(1, text, StoppingParameters(3, ignore_eos=True), blocks=[1, 2, 3, 4])
    engine.step(1, [sequence], [(1, 100)]).collect()
    assert len(engine.step(1).collect().generations) == 1


def _expected(architecture: str) -> set[str]:
    """Returns what steps are captured of."""
    if architecture in PLAIN_ON_GPUS:
        return set()
    return STEPS - {"computing prompts"} if architecture in ONE_BY_ONE else STEPS


def _uncaptured(engine: Engine) -> set[str]:
    """Returns what the engine reports that steps are not captured of."""
    return {
        what for what, found, _ in (each.partition(" runs without CUDA graphs") for each in engine.fallbacks) if found
    }


def _captured(caplog: pytest.LogCaptureFixture) -> set[str]:
    """Returns what steps have been captured of."""
    start = "captured CUDA graphs for "
    logged = [message.removeprefix(start) for message in caplog.messages if message.startswith(start)]
    return {what.rpartition(" in ")[0] for what in logged}
