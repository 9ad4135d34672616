"""The engine's types as messages, and back."""

import pytest

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import FinishReason
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.step import Generation, StepResult
from tgi_server.shard import conversion


def test_a_request_becomes_a_sequence() -> None:
    request = pb.Request(
        id=7,
        input_ids=[5, 6, 7],
        generated_ids=[8],
        max_new_tokens=9,
        ignore_eos=True,
        logprobs=True,
        top_n_tokens=2,
        grammar=pb.Grammar(type=pb.Grammar.LARK, value="start: /a/"),
        block_ids=[3, 4],
        cached_tokens=2,
        copy=pb.BlockCopy(source=1, target=3, tokens=2),
    )
    sequence = conversion.sequence(request)
    assert sequence.request_id == 7
    assert sequence.known.tolist() == [5, 6, 7, 8]
    assert sequence.remaining == 2
    assert (sequence.stopping.max_new_tokens, sequence.stopping.ignore_eos) == (9, True)
    assert (sequence.report.logprobs, sequence.report.top_n_tokens) == (True, 2)
    assert sequence.grammar is not None
    assert sequence.grammar.value == "start: /a/"
    assert sequence.blocks == [3, 4]
    assert sequence.copy is not None
    assert sequence.copy.tokens == 2


@pytest.mark.parametrize("fields", [{}, {"input_ids": [1, 2], "cached_tokens": 2}])
def test_a_request_without_tokens_to_compute_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidCall, match="request 0"):
        conversion.sequence(pb.Request(**fields))


def test_jump_forward_tokens_are_certain() -> None:
    generation = Generation(1, 5, jump_forward=[6, 7], hidden=[1], logprob=-2.0, finish_reason=FinishReason.LENGTH)
    (message,) = conversion.step_response(StepResult([generation], forward_ns=2, total_ns=5)).generations
    assert list(message.token_ids) == [5, 6, 7]
    assert list(message.logprobs) == [-2.0, 0.0, 0.0]
    assert list(message.hidden) == [1]
    assert message.finish_reason == pb.FINISH_REASON_LENGTH
    assert message.error == ""
