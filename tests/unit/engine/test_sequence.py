import pytest

from tgi_server.contract import StoppingParameters
from tgi_server.engine import RunningSequence
from tgi_server.engine.errors import InvalidCall

STOPPING = StoppingParameters(20)


def test_known_tokens_are_the_prompt_and_what_was_generated_before_a_preemption() -> None:
    sequence = RunningSequence(1, [5, 6], STOPPING, generated_ids=[7])
    assert sequence.known.tolist() == [5, 6, 7]
    assert (sequence.generated, sequence.remaining) == (1, 3)


def test_chunks_follow_each_other() -> None:
    sequence = RunningSequence(1, [5, 6, 7, 8], STOPPING, computed=1)
    assert sequence.next_chunk(2).tolist() == [6, 7]
    assert sequence.remaining == 1
    with pytest.raises(InvalidCall, match="request 1: a chunk of 2 tokens, but 1 are left"):
        sequence.next_chunk(2)
    with pytest.raises(InvalidCall, match="a chunk of 0 tokens"):
        sequence.next_chunk(0)


def test_a_sequence_needs_a_token_to_compute() -> None:
    with pytest.raises(InvalidCall, match="request 1 has no input tokens"):
        RunningSequence(1, [], STOPPING)
    with pytest.raises(InvalidCall, match="request 1: at least its last token must be computed"):
        RunningSequence(1, [5, 6], STOPPING, computed=2)


def test_jump_forward_tokens_need_slots_behind_the_last_token() -> None:
    sequence = RunningSequence(1, [5, 6, 7], STOPPING, blocks=[4, 9])
    assert sequence.jump_forward_room(block_size=4) == 4
    sequence.append([10, 11])
    assert sequence.jump_forward_room(block_size=4) == 2
    assert sequence.jump_forward_room(block_size=2) == 0


def test_jump_forward_tokens_are_computed_like_a_prompt() -> None:
    sequence = RunningSequence(1, [5, 6, 7], STOPPING, computed=0)
    sequence.next_chunk(3)
    sequence.append([10])  # computed by the next step as any other token
    sequence.append([11, 12, 13])
    sequence.jump(3)
    assert sequence.jumping
    assert sequence.known.tolist() == [5, 6, 7, 10, 11, 12, 13]
    assert sequence.next_chunk(sequence.remaining).tolist() == [11, 12, 13]
