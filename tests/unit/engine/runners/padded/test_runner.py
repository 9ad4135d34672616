"""The padded way: what the engine refuses there, what it reports, and how rows are kept."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import make
from tests.unit.engine.requests import MAX_TOTAL_TOKENS, NEW, Requests, expected_tokens, load_engine, prompts
from tgi_server.contract import ReportParameters, StoppingParameters
from tgi_server.engine import Engine, RunningSequence
from tgi_server.engine.errors import InvalidCall, NotEnoughMemory

ALL_AT_ONCE = (3, 70, 1, 2, 5, 64, 4, 1, 30, 2, 6, 1, 3, 2, 40, 1)
STOPPING = StoppingParameters(NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def codegen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("codegen", tmp_path_factory.mktemp("codegen"))


@pytest.fixture(scope="module")
def flan_t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("flan_t5", tmp_path_factory.mktemp("flan_t5"))


def warm(folder: Path, **settings) -> Engine:
    engine = load_engine(folder, **settings)
    engine.warm_up(max_batch_size=4, max_prefill_tokens=256, max_total_tokens=MAX_TOTAL_TOKENS)
    return engine


@pytest.mark.parametrize("family", ["codegen", pytest.param("flan_t5", marks=pytest.mark.slow)])
def test_long_and_short_prompts_computed_in_one_step_keep_their_order(family, request) -> None:
    folder = request.getfixturevalue(family)
    texts = prompts(ALL_AT_ONCE)
    requests = Requests(load_engine(folder), texts)
    for index in range(len(texts)):
        requests.join(index)
    assert requests.finish() == expected_tokens(folder, texts)


def test_a_prompt_is_computed_whole_or_not_at_all(codegen) -> None:
    engine = warm(codegen)
    with pytest.raises(InvalidCall, match="in one step"):
        engine.step(1, [RunningSequence(7, [5, 6, 7], STOPPING)], [(7, 2)])
    assert engine.batch is None


def test_a_failed_step_leaves_nothing_behind(codegen) -> None:
    texts = prompts((9, 30))
    requests = Requests(load_engine(codegen), texts)
    with pytest.raises(InvalidCall):
        requests.engine.step(
            1, [RunningSequence(7, [5, 6], STOPPING), RunningSequence(8, [5, 6], STOPPING)], [(7, 2), (8, 1)]
        )
    requests.join(0)
    requests.join(1)
    assert requests.finish() == expected_tokens(codegen, texts)


def test_there_are_no_blocks_to_hand_out(codegen) -> None:
    engine = warm(codegen)
    with pytest.raises(InvalidCall, match="no KV blocks"):
        engine.step(1, [RunningSequence(7, [5, 6], STOPPING, blocks=[1])], [(7, 2)])
    with pytest.raises(InvalidCall, match="no KV blocks"):
        engine.step(1, [RunningSequence(7, [5, 6], STOPPING)], [(7, 2)], grants=[(7, [1])])


def test_capacity_counts_what_a_token_takes(codegen) -> None:
    token_bytes = 2 * 2 * 64 * 4 + 8  # keys and values of two layers of 64 floats each, and the mask
    engine = load_engine(codegen, cpu_memory=1000 * token_bytes)
    capacity = engine.warm_up(max_batch_size=16, max_prefill_tokens=64, max_total_tokens=100)
    assert capacity.max_total_tokens == 100
    assert 990 <= capacity.max_batch_total_tokens <= 1000
    limited = engine.warm_up(16, max_prefill_tokens=64, max_total_tokens=100, max_batch_total_tokens=300)
    assert limited.max_batch_total_tokens == 300
    engine = load_engine(codegen, cpu_memory=200 * token_bytes)
    with pytest.raises(NotEnoughMemory, match="--max-total-tokens"):
        engine.warm_up(max_batch_size=16, max_prefill_tokens=64, max_total_tokens=201)


def test_prompts_likelihoods_are_those_of_the_model_itself(codegen) -> None:
    engine = warm(codegen)
    texts = prompts((20, 3))
    sequences = [
        RunningSequence(index, text, STOPPING, report=ReportParameters(prefill_logprobs=index == 1))
        for index, text in enumerate(texts)
    ]
    first, second = engine.step(1, sequences, [(0, 20), (1, 3)]).collect().generations
    assert first.prompt_tokens is None
    assert second.prompt_tokens is not None
    assert second.prompt_tokens.ids == texts[1]
    assert math.isnan(second.prompt_tokens.logprobs[0])
    logits = AutoModelForCausalLM.from_pretrained(codegen)(torch.tensor([texts[1]])).logits[0]
    expected = logits.log_softmax(-1)[range(2), texts[1][1:]]
    assert second.prompt_tokens.logprobs[1:] == pytest.approx(expected.tolist(), abs=1e-4)


def test_an_encoder_decoder_reports_what_its_decoder_starts_with(flan_t5) -> None:
    engine = warm(flan_t5)
    sequence = RunningSequence(3, [5, 6, 7], STOPPING, report=ReportParameters(prefill_logprobs=True))
    (generation,) = engine.step(1, [sequence], [(3, 3)]).collect().generations
    assert generation.prompt_tokens is not None
    assert generation.prompt_tokens.ids == [0]
    assert math.isnan(generation.prompt_tokens.logprobs[0])
    (generation,) = engine.step(1).collect().generations
    assert generation.prompt_tokens is None
