from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tgi_server.contract import StoppingParameters
from tgi_server.engine import RunningSequence
from tgi_server.engine.speculation.drafters import HistoryDrafter, NgramDrafter, TextIndex


def _sequence(prompt: Sequence[int], earlier: Sequence[int] = ()) -> RunningSequence:
    return RunningSequence(1, list(prompt), StoppingParameters(100), earlier_reply=list(earlier))


def _index(*texts: Sequence[int]) -> TextIndex:
    index = TextIndex()
    for text in texts:
        index.extend(text)
    return index


def test_what_followed_the_last_tokens_is_proposed() -> None:
    assert _index([1, 2, 3, 4, 5, 9, 1, 2]).continuation(3) == [3, 4, 5]


def test_more_of_the_last_tokens_tell_more_than_fewer() -> None:
    text = [1, 2, 3, 4, 50, 9, 9, 3, 4, 60, 1, 2, 3, 4]
    assert _index(text).continuation(1) == [50]


def test_of_two_places_the_later_one_counts() -> None:
    assert _index([1, 2, 7, 1, 2, 8, 1, 2]).continuation(1) == [8]


def test_a_text_that_repeats_itself_is_proposed_to_go_on_so() -> None:
    assert _index([5, 6, 7, 5, 6]).continuation(7) == [7, 5, 6, 7, 5, 6, 7]
    assert _index([5, 5, 5]).continuation(4) == [5, 5, 5, 5]


def test_nothing_is_proposed_after_what_never_came_before() -> None:
    assert _index([1, 2, 3, 4, 5]).continuation(4) == []
    assert _index([1]).continuation(4) == []
    assert _index().continuation(4) == []


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=6))
def test_a_text_may_come_in_parts(parts: list[list[int]]) -> None:
    whole = [token for part in parts for token in part]
    assert _index(*parts).continuation(5) == _index(whole).continuation(5)


def test_prompt_and_reply_are_looked_through() -> None:
    drafter = NgramDrafter()
    sequence = _sequence([1, 2, 3, 4])
    assert drafter.propose({sequence: 3}) == {sequence: []}
    sequence.append([1, 2])
    assert drafter.propose({sequence: 2}) == {sequence: [3, 4]}
    sequence.append([3, 4, 8, 1, 2, 3, 4])
    assert [*drafter.propose({sequence: 1, _sequence([1, 2]): 1}).values()] == [[8], []]


def test_an_earlier_reply_is_proposed_for_as_long_as_it_is_repeated() -> None:
    drafter = HistoryDrafter()
    sequence = _sequence([1, 2], earlier=[7, 8, 9, 10])
    assert drafter.propose({sequence: 2}) == {sequence: [7, 8]}
    sequence.append([7])
    assert drafter.propose({sequence: 5}) == {sequence: [8, 9, 10]}
    sequence.append([8, 5])
    assert drafter.propose({sequence: 5}) == {sequence: []}
    sequence.append([10])
    assert drafter.propose({sequence: 5}) == {sequence: []}


def test_a_sequence_that_was_preempted_goes_on_with_the_earlier_reply() -> None:
    sequence = RunningSequence(1, [1, 2], StoppingParameters(9), generated_ids=[7, 8], earlier_reply=[7, 8, 9])
    assert HistoryDrafter().propose({sequence: 4}) == {sequence: [9]}


def test_beyond_the_earlier_reply_nothing_is_proposed() -> None:
    sequence = _sequence([1, 2], earlier=[7])
    sequence.append([7])
    assert HistoryDrafter().propose({sequence: 4}) == {sequence: []}
    sequence.append([8])
    assert HistoryDrafter().propose({sequence: 4}) == {sequence: []}
