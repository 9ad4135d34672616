"""A step hands out its tokens, and ends the sequences whose last token it brings."""

import pytest
import torch

from tgi_server import demo_model
from tgi_server.contract import FinishReason, ReportParameters, StoppingParameters
from tgi_server.engine import Engine, EngineConfig, RunningSequence
from tgi_server.engine.driver import BATCH_ID


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine(EngineConfig(demo_model.PATH, dtype=torch.float32))
    engine.warm_up(max_batch_size=2, max_prefill_tokens=64, max_total_tokens=64)
    return engine


def sequence(request_id: int, new: int, **options) -> RunningSequence:
    stopping = StoppingParameters(new, ignore_eos=True)
    return RunningSequence(request_id, [1, 40], stopping, blocks=[1 + request_id], **options)


def test_a_sequence_with_its_last_token_leaves_the_batch(engine) -> None:
    engine.clear()
    step = engine.step(BATCH_ID, [sequence(0, 1), sequence(1, 2)], [(0, 2), (1, 2)])
    step.synchronize()
    first, second = step.collect().generations
    assert (first.finish_reason, second.finish_reason) == (FinishReason.LENGTH, None)
    assert engine.batch is not None
    assert engine.batch.request_ids() == [1]


def test_a_sequence_that_left_meanwhile_gets_its_token_but_none_after_its_last(engine) -> None:
    engine.clear()
    step = engine.step(BATCH_ID, [sequence(0, 1), sequence(1, 5)], [(0, 2), (1, 2)])
    after = engine.step(BATCH_ID)
    engine.keep(BATCH_ID, [])
    assert [generation.request_id for generation in step.collect().generations] == [0, 1]
    assert [generation.request_id for generation in after.collect().generations] == [1]


def test_a_result_leaves_the_batch_as_it_is_until_its_step_is_retired(engine) -> None:
    engine.clear()
    step = engine.step(BATCH_ID, [sequence(0, 1), sequence(1, 5)], [(0, 2), (1, 2)])
    step.result()
    assert engine.batch.request_ids() == [0, 1]
    engine.keep(BATCH_ID, [1])
    again = engine.step(BATCH_ID, [sequence(0, 3)], [(0, 2)])
    step.retire()  # the sequence that has come back under the same id stays
    assert engine.batch.request_ids() == [1, 0]
    assert [generation.request_id for generation in again.collect().generations] == [1, 0]


def test_a_step_is_resolved_once(engine) -> None:
    engine.clear()
    step = engine.step(BATCH_ID, [sequence(0, 5)], [(0, 2)])
    generations = step.resolve()
    assert step.collect().generations is generations
    assert engine.batch is not None
    assert engine.batch.rows[0].generated == 1


def test_a_report_on_the_prompt_comes_with_the_first_token_only(engine) -> None:
    engine.clear()
    report = ReportParameters(prefill_logprobs=True)
    (first,) = engine.step(BATCH_ID, [sequence(0, 5, report=report)], [(0, 2)]).collect().generations
    (second,) = engine.step(BATCH_ID).collect().generations
    assert first.prompt_tokens is not None
    assert first.prompt_tokens.ids == [1, 40]
    assert second.prompt_tokens is None


def test_times_of_a_step_add_up(engine) -> None:
    engine.clear()
    result = engine.step(BATCH_ID, [sequence(0, 5)], [(0, 2)]).collect()
    assert 0 < result.forward_ns <= result.total_ns
