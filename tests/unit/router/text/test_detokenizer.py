import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fakes.vocabularies import byte_level, sentence_piece
from tgi_server.router.text.detokenizer import Detokenizer, StopSequences
from tgi_server.router.text.tokenizer import TextTokenizer

BYTE_LEVEL, SENTENCE_PIECE = byte_level(), sentence_piece()


def pieces(tokenizer: TextTokenizer, prompt: str, continuation: str) -> list[str]:
    """The text of each token of `continuation` behind `prompt`, and the flushed rest."""
    detokenizer = Detokenizer(tokenizer, tokenizer.encode(prompt, add_special_tokens=True).ids)
    ids = tokenizer.encode(continuation, add_special_tokens=False).ids
    return [*(detokenizer.step(each) for each in ids), detokenizer.flush()]


def test_words_come_as_they_are():
    assert pieces(BYTE_LEVEL, "so: ", "hello world") == ["hello", " world", ""]


def test_a_character_of_several_tokens_comes_with_its_last():
    assert pieces(BYTE_LEVEL, "x", "a🍕b") == ["a", "", "", "", "🍕", "b", ""]


def test_characters_spelled_in_bytes_come_with_their_last_byte():
    # The first piece of any text is the mark of a space.
    assert pieces(SENTENCE_PIECE, "hello", "日a") == [" ", "", "", "日", "a", ""]


def test_the_space_in_front_of_a_word_survives_behind_a_prompt():
    ids = [SENTENCE_PIECE.encode("hello", add_special_tokens=True).ids]
    detokenizer = Detokenizer(SENTENCE_PIECE, ids[0])
    world = 260
    assert SENTENCE_PIECE.decode([world]) == "world"
    assert detokenizer.step(world) == " world"


def test_an_incomplete_character_at_the_end_is_marked():
    detokenizer = Detokenizer(BYTE_LEVEL, [])
    first, second, *_ = BYTE_LEVEL.encode("🍕", add_special_tokens=False).ids
    assert [detokenizer.step(first), detokenizer.step(second)] == ["", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_bytes_that_never_become_a_character_do_not_hold_the_text_back_for_ever():
    continuation = BYTE_LEVEL.encode("é", add_special_tokens=False).ids[1]
    detokenizer = Detokenizer(BYTE_LEVEL, [])
    texts = [detokenizer.step(continuation) for _ in range(20)]
    assert any(texts)
    assert set("".join(texts)) == {"\ufffd"}


def test_a_broken_character_in_the_middle_is_marked_and_the_text_goes_on():
    broken = BYTE_LEVEL.encode("🍕", add_special_tokens=False).ids[:2]
    word = BYTE_LEVEL.encode("hello", add_special_tokens=False).ids
    detokenizer = Detokenizer(BYTE_LEVEL, [])
    assert "".join(detokenizer.step(each) for each in broken + word) == "\ufffdhello"


@given(st.text(max_size=40), st.text(max_size=40))
def test_pieces_add_up_to_the_text(prompt: str, continuation: str):
    assert "".join(pieces(BYTE_LEVEL, prompt, continuation)) == continuation


@given(st.lists(st.integers(2, 257), max_size=30), st.lists(st.integers(2, 257), max_size=30))
@example(prompt=[], generated=[96] * 7 + [128, 96])  # a character that begins when patience ends
def test_any_bytes_read_as_they_do_at_once(prompt: list[int], generated: list[int]):
    """Whatever the model generates, pieces add up to what decoding all of it at once gives."""
    detokenizer = Detokenizer(BYTE_LEVEL, [])
    text = "".join(detokenizer.step(each) for each in generated) + detokenizer.flush()
    # How many marks stand for a run of broken bytes depends on where it is cut.
    whole = BYTE_LEVEL.decode(generated) if generated else ""
    assert text.replace("\ufffd", "") == whole.replace("\ufffd", "")


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE])
def test_special_tokens_of_the_prompt_are_no_context(tokenizer: TextTokenizer):
    detokenizer = Detokenizer(tokenizer, [0, 1, 0])
    ids = tokenizer.encode("hello", add_special_tokens=False).ids
    assert "".join(detokenizer.step(each) for each in ids) == "hello"


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
