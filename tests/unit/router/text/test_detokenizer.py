import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fakes.vocabularies import byte_level, sentence_piece
from tgi_server.router.text.detokenizer import Detokenizer
from tgi_server.router.text.tokenizer import TextTokenizer

BYTE_LEVEL, SENTENCE_PIECE = byte_level(), sentence_piece()


def pieces(tokenizer: TextTokenizer, prompt: str, continuation: str) -> list[str]:
    """Returns the text of each token of `continuation` after `prompt`, and the flushed rest."""
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


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE])
@pytest.mark.parametrize("prompt_tokens", [1, 2, 3])
def test_a_character_that_begins_in_the_prompt_is_whole(tokenizer: TextTokenizer, prompt_tokens: int):
    ids = tokenizer.encode("a🍕b", add_special_tokens=False).ids
    start = len(ids) - 5 + prompt_tokens
    detokenizer = Detokenizer(tokenizer, ids[:start])
    assert "".join(detokenizer.step(each) for each in ids[start:]) == "🍕b"
    broken = Detokenizer(tokenizer, ids[:start])
    assert broken.step(ids[-1]) + broken.flush() == "b"
    assert Detokenizer(tokenizer, ids[:start]).flush() == ""
    ended = Detokenizer(tokenizer, [*ids[:start], 0])  # by a special token
    assert ended.step(ids[-1]) == "b"


def test_a_mark_in_the_prompt_is_no_broken_character():
    detokenizer = Detokenizer(BYTE_LEVEL, BYTE_LEVEL.encode("\ufffd", add_special_tokens=False).ids)
    (b,) = BYTE_LEVEL.encode("b", add_special_tokens=False).ids
    assert detokenizer.step(b) == "b"


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
