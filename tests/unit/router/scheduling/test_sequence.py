import asyncio
from typing import Any

import pytest

from shared.stubs import generate_pb2 as pb
from tests.fakes.recording_sink import RecordingSink, recorded_request
from tgi_server.contract import BlockCopy, FinishReason, SamplingParameters
from tgi_server.router.errors import GenerationFailed, GrammarFailed, InvalidRequest, RouterError
from tgi_server.router.scheduling.sequence import Sequence


def _running(max_new_tokens: int = 8, **parameters: Any) -> tuple[Sequence, RecordingSink]:
    """A sequence with a prompt of three tokens, which step 5 computes."""
    request, sink = recorded_request(1, [1, 2, 3], max_new_tokens, **parameters)
    sequence = Sequence(request, sink)
    sequence.admit([7])
    sequence.start()
    sequence.compute(3, step=5)
    return sequence, sink


def _generation(*token_ids: int, **fields: Any) -> pb.Generation:
    return pb.Generation(request_id=1, token_ids=token_ids, **fields)


def test_the_message_has_what_the_sequence_has_when_it_joins() -> None:
    sequence = Sequence(*recorded_request(1, [1, 2, 3, 4], prefill_logprobs=True))
    sequence.admit([7, 8], cached=3, copy=BlockCopy(5, 7, 1))
    message = sequence.message
    assert (list(message.block_ids), message.cached_tokens, message.copy.target) == ([7, 8], 3, 7)
    assert message.prefill_logprobs
    assert sequence.remaining == 1


def test_a_preempted_sequence_joins_again_with_what_it_generated() -> None:
    sequence, _ = _running(prefill_logprobs=True)
    sequence.advance(_generation(9))
    sequence.preempt()
    assert (sequence.remaining, sequence.blocks, sequence.first_step) == (4, [], None)
    sequence.admit([8])
    assert list(sequence.message.generated_ids) == [9]
    assert not sequence.message.HasField("copy")
    assert not sequence.message.prefill_logprobs  # they have been reported


@pytest.mark.parametrize("parameters", [{"sampling": SamplingParameters(top_k=2**32)}, {"top_n_tokens": -1}])
def test_what_no_message_can_hold_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="the shards cannot take"):
        Sequence(*recorded_request(1, [1], **parameters))


def test_the_step_at_which_its_blocks_are_full_is_known_in_advance() -> None:
    sequence, _ = _running(max_new_tokens=8)
    assert sequence.full_step(block_size=4) == 7  # steps 5 and 6 compute the positions 2 and 3
    sequence.grow(8)
    assert sequence.full_step(block_size=4) == 11
    sequence.grow(9)
    assert sequence.full_step(block_size=4) is None  # its last step is 12
    assert sequence.last_step == 12


def test_the_newest_tokens_are_not_settled() -> None:
    sequence, _ = _running()
    assert sequence.settled == 2
    sequence.advance(_generation(9, 10))
    assert sequence.settled == 3
    sequence.advance(_generation(error="no token fits"))
    assert sequence.settled == 3


def test_how_a_request_ends() -> None:
    sequence, _ = _running()
    assert sequence.advance(_generation(9)) is None
    assert sequence.advance(_generation(9, finish_reason=pb.FINISH_REASON_LENGTH)) is FinishReason.LENGTH
    assert isinstance(sequence.advance(_generation(error="no token fits")), GrammarFailed)
    stopped, _ = _running(stop_after=1)
    assert stopped.advance(_generation(9)) is FinishReason.STOP_SEQUENCE


def test_hidden_tokens_are_kept_from_the_sink() -> None:
    sequence, sink = _running()
    generation = _generation(9, 10, 11, logprobs=[-1.0, 0.0, 0.0], hidden=[0, 2])
    sequence.advance(generation)
    assert sink.tokens == [10]
    assert list(generation.logprobs) == [0.0]
    assert list(sequence.tokens) == [1, 2, 3, 9, 10, 11]


def test_the_sink_is_told_of_the_start_once() -> None:
    sequence, sink = _running()
    sequence.preempt()
    assert not sequence.start()
    assert sink.starts == 1


@pytest.mark.logs_tracebacks
@pytest.mark.parametrize("fault", [ValueError(), asyncio.CancelledError()])
def test_a_sink_that_raises_ends_its_own_request(fault: BaseException) -> None:
    def broken(*_: object) -> None:
        raise fault

    sequence, sink = _running()
    sink.push = broken  # type: ignore[assignment, method-assign]
    assert isinstance(sequence.advance(_generation(9)), RouterError)
    sink.finished = broken  # type: ignore[method-assign]
    sequence.finish(FinishReason.LENGTH)
    assert isinstance(sink.error, RouterError)
    sink.failed = broken  # type: ignore[method-assign]
    sequence.finish(GenerationFailed("lost"))


def test_nobody_is_told_of_a_request_that_nobody_waits_for() -> None:
    sequence, sink = _running()
    sequence.finish(None)
    assert not sink.ended
