"""The driver of an engine: rows, blocks and chunks as sequences come and go."""

import pytest
import torch

from tgi_server import demo_model
from tgi_server.contract import FinishReason, StoppingParameters
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine.driver import Driver
from tgi_server.engine.errors import NotEnoughMemory

NEW = 6


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine(EngineConfig(demo_model.PATH, dtype=torch.float32))
    engine.warm_up(max_batch_size=2, max_prefill_tokens=64, max_total_tokens=64)
    return engine


def sequence(index: int, length: int = 5) -> RunningSequence:
    return RunningSequence(index, list(range(1, 1 + length)), StoppingParameters(NEW, ignore_eos=True))


def test_a_sequence_waits_until_a_row_is_free(engine) -> None:
    driver = Driver(engine)
    outputs = [driver.add(sequence(index)) for index in range(3)]
    driver.step()
    assert [len(output.tokens) for output in outputs] == [1, 1, 0]
    driver.run()
    assert [output.tokens for output in outputs] == [outputs[0].tokens] * 3
    assert all(output.finish_reason is FinishReason.LENGTH for output in outputs)
    assert not driver.busy


def test_a_sequence_waits_until_blocks_are_free(engine) -> None:
    driver = Driver(engine, blocks=[3])
    first, second = driver.add(sequence(0)), driver.add(sequence(1))
    driver.step()
    assert (len(first.tokens), len(second.tokens)) == (1, 0)
    driver.run()
    assert second.tokens == first.tokens


def test_a_sequence_that_can_never_fit_is_refused(engine) -> None:
    with pytest.raises(NotEnoughMemory, match="request 7 needs 2 KV blocks; the cache has 1"):
        Driver(engine, blocks=[3]).run(sequence(7, 40))


def test_a_step_takes_in_no_more_prompt_tokens_than_it_may(engine) -> None:
    driver = Driver(engine, max_prefill_tokens=8)
    first, second = driver.add(sequence(0)), driver.add(sequence(1))
    driver.step()
    assert (len(first.tokens), len(second.tokens)) == (1, 0)
    assert driver.waiting
    driver.step()
    assert (len(first.tokens), len(second.tokens)) == (2, 1)
    assert not driver.waiting


def test_blocks_of_a_sequence_that_leaves_are_free_for_the_next(engine) -> None:
    driver = Driver(engine, blocks=[3])
    driver.add(sequence(0))
    driver.step()
    driver.leave(0)
    (output,) = driver.run(sequence(1))
    assert len(output.tokens) == NEW
    assert len(driver.outputs[0].tokens) == 1
