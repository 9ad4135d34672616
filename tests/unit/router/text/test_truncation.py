"""Of a long text that is cut only the end is tokenised, and that is the same as if all of it had been."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.fakes.vocabularies import byte_level, sentence_piece
from tgi_server import demo_model
from tgi_server.router.text import truncation
from tgi_server.router.text.tokenizer import TextTokenizer, load_tokenizer
from tgi_server.router.text.tokenizer_config import TokenizerConfig, read_tokenizer_config
from tgi_server.router.text.truncation import last_ids

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def in_threes() -> Tokenizer:
    """Digits are split three by three from their beginning, and letters are joined in pairs, fours and eights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "a"), ("aa", "aa"), ("aaaa", "aaaa"), ("1", "1"), ("11", "1"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("i", "c")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def whole_sentences() -> Tokenizer:
    """The likeliest pieces of all of the text, with a mark in front of it; like T5's."""
    pieces = [("<unk>", 0.0), *((each, -float(len(each) % 3 + 2)) for each in ("▁", "▁rice", "rice", "ri", "ce", "aa"))]
    letters = [(each, -6.0) for each in "rice123a.\n"]
    tokenizer = Tokenizer(models.Unigram([*pieces, *letters], unk_id=0))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level(),
    "sentence piece": sentence_piece(),
    "demo model": load_tokenizer(demo_model.PATH, read_tokenizer_config(demo_model.PATH, None)),
    "digits in threes": TextTokenizer(in_threes(), TokenizerConfig()),
    "whole sentences": TextTokenizer(whole_sentences(), TokenizerConfig()),
}
PIECES = st.sampled_from(
    ["rice ", "a", "aaa", "1", "1234567", " ", "\n\n", "🍕", "é", "<|user|>", "hello world. ", "ri ce"]
)
RUNS = st.tuples(PIECES, st.sampled_from([1, 2, 3, 50, 1_000])).map(lambda run: run[0] * run[1])


def check(name: str, text: str, tokens: int) -> None:
    def encode(part: str) -> list[int]:
        return TOKENIZERS[name].encode(part, add_special_tokens=True).ids

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncation, "_FOR_NONE", 64)  # texts of some thousand characters are long then
        assert last_ids(encode, text, tokens) == encode(text)[-tokens:]


@settings(max_examples=5 * settings().max_examples, deadline=None)
@given(st.sampled_from(sorted(TOKENIZERS)), st.lists(RUNS, min_size=1, max_size=20).map("".join), st.integers(1, 40))
@example("digits in threes", "1234567" * 50 + "11", 1)  # two of three cuts agree
def test_the_last_tokens_are_those_of_the_whole_text(name: str, text: str, tokens: int):
    check(name, text, tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("letter", ["1", "a", "aa ", " ", "12"])
def test_a_run_of_one_letter_is_cut_where_the_whole_is(name: str, letter: str):
    """Its tokens depend on how long it is."""
    for length in range(700, 713):
        for end in ("", ".", "1 rice"):
            check(name, letter * length + end, 3)


@pytest.mark.parametrize("text", ["rice and beans. " * 100_000, "1234567, " * 200_000, "🍕 é\n" * 300_000])
def test_of_a_text_with_words_only_the_end_is_tokenised(text: str):
    tokenised = 0

    def encode(part: str) -> list[int]:
        nonlocal tokenised
        tokenised += len(part)
        return TOKENIZERS["demo model"].encode(part, add_special_tokens=False, offsets=False).ids

    assert len(last_ids(encode, text, 100)) == 100
    assert tokenised < 18_000
