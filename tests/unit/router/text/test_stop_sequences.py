"""Stop sequences end a text, however it is cut into pieces."""

from hypothesis import given
from hypothesis import strategies as st

from tgi_server.router.text.stop_sequences import StopSequences


def feed(sequences: list[str], pieces: list[str], *, reveal: bool) -> tuple[list[str], bool]:
    """Returns the text shown after each piece, last what is flushed, and True if a stop sequence came."""
    stops = StopSequences(sequences, reveal=reveal)
    shown: list[str] = []
    for piece in pieces:
        text, stopped = stops.feed(piece)
        shown.append(text)
        if stopped:
            return shown, True
    return [*shown, stops.flush()], False


def test_a_revealed_stop_sequence_ends_the_text():
    assert feed(["stop"], ["do ", "stop it"], reveal=True) == (["do ", "stop"], True)


def test_a_hidden_stop_sequence_is_not_part_of_the_text():
    assert feed(["stop"], ["do ", "stop it"], reveal=False) == (["do ", ""], True)


def test_a_stop_sequence_is_found_across_pieces():
    assert feed(["stop"], ["a s", "t", "op!"], reveal=True) == (["a s", "t", "op"], True)


def test_what_may_be_its_beginning_is_held_back_when_it_is_hidden():
    assert feed(["stop"], ["a s", "t", "op!"], reveal=False) == (["a ", "", ""], True)
    assert feed(["stop"], ["a s", "t", "ay"], reveal=False) == (["a ", "", "stay", ""], False)


def test_what_was_held_back_comes_at_the_end():
    assert feed(["stop"], ["a st"], reveal=False) == (["a ", "st"], False)


def test_the_one_that_is_complete_first_ends_the_text():
    assert feed(["cde", "bc"], ["abcde"], reveal=False) == (["a"], True)
    assert feed(["cde", "bc"], ["abcde"], reveal=True) == (["abc"], True)


def test_of_two_that_are_complete_together_the_longer_one_is_hidden():
    assert feed(["end", "the end"], ["that is the end"], reveal=False) == (["that is "], True)


def test_repeated_beginnings():
    assert feed(["aab"], ["a", "a", "a", "b"], reveal=False) == (["", "", "a", ""], True)


def test_a_single_character():
    assert feed(["."], ["a", "b.c"], reveal=False) == (["a", "b"], True)
    assert feed(["."], ["a", "b.c"], reveal=True) == (["a", "b."], True)


texts = st.text("ab", max_size=12)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(texts, max_size=8))
def test_how_the_text_is_cut_does_not_matter(sequences: list[str], pieces: list[str]):
    for reveal in (True, False):
        shown, stopped = feed(sequences, pieces, reveal=reveal)
        whole, stopped_at_once = feed(sequences, ["".join(pieces)], reveal=reveal)
        assert stopped == stopped_at_once
        assert "".join(shown) == "".join(whole)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(texts, max_size=8))
def test_nothing_of_a_hidden_stop_sequence_is_ever_shown(sequences: list[str], pieces: list[str]):
    shown, stopped = feed(sequences, pieces, reveal=False)
    text = "".join(shown)
    assert not any(sequence in text for sequence in sequences)
    if not stopped:
        assert text == "".join(pieces)
