from dataclasses import replace

import pytest

from tests.fakes.recording_sink import recorded_request
from tgi_server.contract import Image, Tensor
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.scheduling.memory import Memory, PaddedMemory, PagedMemory, Verdict, space_of
from tgi_server.router.scheduling.sequence import Sequence

PLENTY = 10_000


def _sequence(request_id: int, prompt: list[int], max_new_tokens: int = 8) -> Sequence:
    return Sequence(*recorded_request(request_id, prompt, max_new_tokens))


def _computed(memory: PagedMemory, sequence: Sequence) -> Sequence:
    """Admits a sequence, and has a step compute its whole prompt."""
    assert memory.admit(sequence, PLENTY) is Verdict.ADMITTED
    sequence.compute(sequence.remaining, step=1)
    memory.computed(sequence)
    memory.sent()
    return sequence


@pytest.mark.parametrize(("memory", "longest"), [(PagedMemory(8, 4), 33), (PaddedMemory(32), 32)])
def test_a_request_that_never_fits_is_refused_with_its_need(memory: Memory, longest: int) -> None:
    memory.check_length(_sequence(1, [1], longest - 1))
    with pytest.raises(InvalidRequest, match="the request needs 33 tokens of KV cache; the cache has 32"):
        memory.check_length(_sequence(1, [1], longest))


def test_a_sequence_gets_the_blocks_of_its_prompt_and_grows() -> None:
    memory = PagedMemory(8, 4)
    sequence = _computed(memory, _sequence(1, [1, 2, 3, 4, 5]))
    assert (len(sequence.blocks), memory.held_tokens) == (2, 8)
    assert memory.grow(sequence) == sequence.blocks[-1]
    assert (len(sequence.blocks), memory.held_tokens) == (3, 12)
    memory.check([sequence])


def test_there_is_no_room_beyond_the_budget() -> None:
    memory = PagedMemory(8, 4)
    first = _computed(memory, _sequence(1, [1] * 9))
    second = _sequence(2, [2] * 9)
    assert memory.admit(second, budget=11) is Verdict.FULL
    assert memory.admit(second, budget=12) is Verdict.ADMITTED
    memory.check([first, second])


def test_alone_a_sequence_is_admitted_whatever_the_budget() -> None:
    assert PagedMemory(8, 4).admit(_sequence(1, [1] * 20), budget=0) is Verdict.ADMITTED


def test_what_a_call_computes_is_waited_for_if_it_is_long() -> None:
    memory = PagedMemory(100, 4)
    first = _sequence(1, [1] * 80)
    memory.admit(first, PLENTY)
    first.compute(80, step=1)
    memory.computed(first)
    second = _sequence(2, [1] * 80)
    assert memory.admit(second, PLENTY) is Verdict.LATER
    memory.sent()
    assert memory.admit(second, PLENTY) is Verdict.ADMITTED
    assert second.cached == 79


def test_the_source_of_a_copy_is_held_until_the_call_is_sent() -> None:
    memory = PagedMemory(3, 4)
    first = _computed(memory, _sequence(1, [1, 2, 3, 4, 5, 6]))
    memory.release(first)
    second = _sequence(2, [1, 2, 3, 4, 5, 7])
    assert memory.admit(second, PLENTY) is Verdict.ADMITTED
    assert second.message.copy.tokens == 1
    assert memory.held_tokens == 12  # two blocks of its own, one of them shared, and the source
    memory.check([second])
    memory.sent()
    assert memory.held_tokens == 8
    memory.check([second])


def test_rebuilt_books_have_what_the_sequences_hold_and_nothing_more() -> None:
    memory = PagedMemory(8, 4)
    prompt = [1, 2, 3, 4, 5, 6]
    kept = _computed(memory, _sequence(1, prompt))
    broken = _sequence(2, [*prompt[:5], 9])
    memory.admit(broken, PLENTY)
    memory.rebuild([kept])
    memory.check([kept])
    assert (memory.held_tokens, memory.cached_tokens) == (8, 0)
    copying = _sequence(3, [*prompt[:5], 9])
    memory.release(kept)
    memory.admit(copying, PLENTY)
    memory.rebuild([copying])
    memory.check([copying])
    assert memory.held_tokens == 12  # the source of its copy is still to be read
    memory.sent()
    memory.check([copying])


def test_a_padded_batch_is_as_long_as_its_longest_sequence_in_every_row() -> None:
    memory = PaddedMemory(40)
    first, second, third = (_sequence(each, [1, 2, 3], tokens) for each, tokens in ((1, 7), (2, 7), (3, 17)))
    assert memory.admit(first, budget=40) is Verdict.ADMITTED
    assert memory.admit(second, budget=30) is Verdict.ADMITTED
    assert memory.held_tokens == 20
    assert memory.admit(third, budget=20) is Verdict.FULL
    memory.release(second)
    assert memory.admit(third, budget=30) is Verdict.ADMITTED
    assert memory.held_tokens == 40
    memory.rebuild([first])
    memory.check([first])


def _with_image(request_id: int, digest: bytes, after: int = 9) -> Sequence:
    """A sequence of 3 tokens, an image of 10, and 4 more."""
    request, sink = recorded_request(request_id, [1, 2, 3, *[7] * 10, 4, 5, 6, after])
    image = Image(digest, 3, 10, (Tensor("pixel_values", "float32", (1,), b"1234"),))
    return Sequence(replace(request, images=(image,)), sink)


def test_images_are_told_apart_by_what_they_show() -> None:
    memory = PagedMemory(100, 4)
    first = _computed(memory, _with_image(1, b"one"))
    memory.release(first)
    same, other = _with_image(2, b"one", after=10), _with_image(3, b"other")
    assert (memory.unseen(same), [each.digest for each in memory.unseen(other)]) == ([], [b"other"])
    assert (_computed(memory, same).cached, _computed(memory, other).cached) == (16, 3)
    assert [image.tensors for image in same.images.messages(same.cached)] == [()]
    assert [image.tensors for image in other.images.messages(other.cached)] == [other.request.images[0].tensors]
    memory.check([same, other])


def test_no_cached_prefix_ends_inside_an_image() -> None:
    memory = PagedMemory(100, 4)
    first = _with_image(1, b"one")
    memory.admit(first, PLENTY)
    first.compute(8, step=1)  # a part of the image
    memory.computed(first)
    memory.sent()
    memory.release(first)
    second = _computed(memory, _with_image(2, b"one"))
    assert second.cached == 3
    memory.check([second])


def test_chunks_do_not_cut_images() -> None:
    sequence = _with_image(1, b"one")
    assert [sequence.images.whole(sequence.computed, tokens) for tokens in (2, 3, 8, 13, 15)] == [2, 3, 3, 13, 15]
    sequence.computed = 3
    assert [sequence.images.whole(sequence.computed, tokens) for tokens in (1, 9, 10, 12)] == [10, 10, 10, 12]


def _cached(memory: PagedMemory, request_id: int, prompt: list[int]) -> list[int]:
    """Has a prompt computed and given up. Returns the blocks that it fills."""
    sequence = _computed(memory, _sequence(request_id, prompt))
    memory.release(sequence)
    return memory.cached_blocks(space_of(sequence), sequence.beginning(len(prompt)))


def test_lent_blocks_stay_as_they_are_until_they_are_given_back() -> None:
    memory = PagedMemory(4, 4)
    blocks = _cached(memory, 1, [1] * 8)
    memory.lend(blocks)
    memory.check([])
    first = _sequence(2, [2] * 9)
    assert memory.admit(first, PLENTY) is Verdict.FULL
    memory.rebuild([])
    memory.check([])
    assert memory.held_tokens == 8
    memory.give_back(blocks)
    memory.check([])
    assert memory.admit(first, PLENTY) is Verdict.ADMITTED


def test_a_prefix_that_was_read_into_lent_blocks_is_found() -> None:
    memory = PagedMemory(6, 4)
    sequence = _sequence(1, [1] * 11)
    space, tokens = space_of(sequence), sequence.beginning(8)
    cached = _cached(memory, 2, [1] * 4)
    memory.lend(cached)
    assert memory.lend_free(3, spare=3) == []
    blocks = memory.lend_free(1, spare=3)
    assert len(blocks) == 1
    memory.insert(space, tokens, [*cached, *blocks])
    memory.give_back([*cached, *blocks])
    memory.check([])
    assert memory.held_tokens == 0
    memory.admit(sequence, PLENTY)
    assert (sequence.cached, sequence.blocks[:2]) == (8, [*cached, *blocks])


def test_a_prefix_that_was_computed_meanwhile_keeps_its_blocks() -> None:
    memory = PagedMemory(8, 4)
    sequence = _sequence(1, [1] * 11)
    blocks = memory.lend_free(2, spare=0)
    computed = _cached(memory, 2, [1] * 8)
    memory.insert(space_of(sequence), sequence.beginning(8), blocks)
    memory.give_back(blocks)
    memory.check([])
    memory.admit(sequence, PLENTY)
    assert sequence.blocks[:2] == computed
