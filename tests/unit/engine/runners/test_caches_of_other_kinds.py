"""Models whose caches are not keys and values of each layer, in all that the paged way does with a cache: shared keys,
heads of different sizes, latents, chunks.
"""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.tiny_models import VOCAB_SIZE, make
from tests.unit.engine.requests import LENGTHS, MAX_TOTAL_TOKENS, NEW, expected_tokens, load_engine, prompts
from tests.unit.engine.speculation.test_invisible import Guesses
from tgi_server.contract import StoppingParameters
from tgi_server.engine import Engine, RunningSequence
from tgi_server.engine.driver import Driver
from tgi_server.engine.speculation.costs import StepCosts

SHARED = ["gemma3n_text", "gemma4_text", "gemma4_text_moe"]
LATENTS = ["deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "minicpm3"]
pytestmark = pytest.mark.slow


@dataclass
class Case:
    """A model, with what `generate()` makes of the prompts."""

    engine: Engine
    expected: list[list[int]]


@pytest.fixture(scope="module", params=[*SHARED, *LATENTS, "llama4_text"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make(request.param, tmp_path_factory.mktemp(request.param))
    engine = load_engine(folder, speculate=5)
    engine.warm_up(max_batch_size=len(LENGTHS), max_prefill_tokens=256, max_total_tokens=MAX_TOTAL_TOKENS)
    assert engine.info.paged
    assert engine.speculation is not None
    engine.speculation.drafters = []
    return Case(engine, expected_tokens(folder, prompts()))


def sequence(index: int, tokens: int = NEW, **state: Any) -> RunningSequence:
    return RunningSequence(index, prompts()[index], StoppingParameters(tokens, ignore_eos=True), **state)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_prompts_in_chunks(case: Case, size: int) -> None:
    driver = Driver(case.engine)
    outputs = [
        driver.add(sequence(index), [size] * (length // size) + [length % size] * (length % size > 0))
        for index, length in enumerate(LENGTHS)
    ]
    driver.run()
    assert [output.tokens for output in outputs] == case.expected


def test_texts_that_begin_in_the_prefix_cache_at_every_position(case: Case) -> None:
    driver = Driver(case.engine)
    blocks = list(range(1, -(-MAX_TOTAL_TOKENS // case.engine.info.block_size) + 1))
    text = LENGTHS.index(40)
    for computed in range(LENGTHS[text]):
        (output,) = driver.run(sequence(text, 3, blocks=list(blocks), computed=computed))
        assert output.tokens == case.expected[text][:3], computed


def test_requests_that_are_preempted_after_every_token(case: Case) -> None:
    driver = Driver(case.engine)
    outputs: dict[int, list[int]] = {index: [] for index in range(0, len(LENGTHS), 2)}
    for _ in range(NEW):
        for index, output in outputs.items():
            driver.add(sequence(index, generated_ids=output))
        driver.step()
        for index, output in outputs.items():
            output += driver.outputs[index].tokens
        driver.leave(*outputs)
    assert list(outputs.values()) == case.expected[::2]


def test_drafts(case: Case) -> None:
    assert case.engine.speculation is not None
    case.engine.speculation.costs = StepCosts({1: 1.0}, {1: 1.0})  # every draft is worth checking
    case.engine.speculation.drafters = [Guesses(dict(enumerate(case.expected)), VOCAB_SIZE)]
    driver = Driver(case.engine)
    outputs = driver.run(*map(sequence, range(len(LENGTHS))))
    case.engine.speculation.drafters = []
    assert [output.tokens for output in outputs] == case.expected
    assert 0 < driver.accepted < driver.drafted
