"""What a small model's cache is said to hold, beside what its blocks really hold."""

import random

from hypothesis import given
from hypothesis import strategies as st

from tgi_server.contract import StoppingParameters
from tgi_server.engine import RunningSequence
from tgi_server.engine.speculation.draft_cache import DraftCache

SIZE = 4


def _sequence(tokens: list[int], blocks: list[int]) -> RunningSequence:
    return RunningSequence(1, tokens, StoppingParameters(100), blocks=blocks)


def test_a_new_sequence_has_all_to_be_computed_and_then_its_new_tokens() -> None:
    cache = DraftCache(SIZE)
    sequence = _sequence([1, 2, 3, 4, 5], [7, 8])
    assert cache.computed(sequence) == 0
    cache.write(sequence, 5)
    sequence.append([6])
    assert cache.computed(sequence) == 5


def test_drafted_tokens_that_were_right_are_computed() -> None:
    cache = DraftCache(SIZE)
    sequence = _sequence([1, 2, 3], [7, 8, 9])
    cache.computed(sequence)
    cache.write(sequence, 3, [4, 5, 6, 7])
    sequence.append([4, 5, 60])
    assert cache.computed(sequence) == 5
    cache.write(sequence, 6, [7, 8])
    sequence.append([7, 8])
    assert cache.computed(sequence) == 7  # the last token always has to be


def test_a_sequence_that_shares_blocks_has_what_lies_in_them() -> None:
    cache = DraftCache(SIZE)
    first = _sequence(list(range(1, 10)), [7, 8, 9])
    cache.computed(first)
    cache.write(first, 6)  # and no further
    assert cache.computed(_sequence(list(range(1, 13)), [7, 8, 5])) == 6
    assert cache.computed(_sequence([1, 2, 3, 4, 5, 60, 70], [7, 8])) == 5
    assert cache.computed(_sequence([0, 2, 3, 4, 5, 6, 7], [7, 8])) == 0
    assert cache.computed(_sequence([1, 2, 3, 4], [7])) == 3


def test_a_block_holds_the_tokens_of_another_text_only_behind_the_same_beginning() -> None:
    cache = DraftCache(SIZE)
    first = _sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3])
    cache.computed(first)
    cache.write(first, 9)
    other = _sequence([1, 1, 1, 1, 5, 6, 7, 8, 9], [4, 2, 3])
    assert cache.computed(other) == 0
    cache.write(other, 4)
    assert cache.computed(_sequence([1, 1, 1, 1, 5, 6, 7, 8, 9], [4, 2, 3])) == 4


@given(st.integers(0, 10**6))
def test_what_is_said_to_be_computed_is_there(seed: int) -> None:
    """Sequences of few tokens come, are computed a little, drafted for, and go; each slot keeps its whole text."""
    numbers = random.Random(seed)
    cache = DraftCache(SIZE)
    slots: dict[int, tuple[int, ...]] = {}  # by slot, the text up to the token whose keys it holds
    for _ in range(12):
        blocks = numbers.sample(range(1, 7), 3)
        sequence = _sequence([numbers.randrange(2) for _ in range(numbers.randrange(1, 7))], blocks)
        for _ in range(numbers.randrange(1, 4)):
            done = cache.computed(sequence)
            assert done < sequence.length
            for place in range(done):
                slot = blocks[place // SIZE] * SIZE + place % SIZE
                assert slots[slot] == tuple(sequence.tokens(0, place + 1))
            end = numbers.randrange(done + 1, sequence.length + 1)
            room = 3 * SIZE - sequence.length - 1
            drafted = [numbers.randrange(2) for _ in range(numbers.randrange(room + 1) if room > 0 else 0)]
            drafted = drafted if end == sequence.length else []
            text = [*sequence.tokens(0, end), *drafted]
            for place in range(done, len(text)):
                slots[blocks[place // SIZE] * SIZE + place % SIZE] = tuple(text[: place + 1])
            cache.write(sequence, end, drafted)
            if sequence.length < 3 * SIZE:
                sequence.append(
                    [numbers.randrange(2) for _ in range(numbers.randrange(1, 3 * SIZE - sequence.length + 1))]
                )
