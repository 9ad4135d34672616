"""Truncation: the last tokens of a long text; usually only its end is tokenized."""

from collections.abc import Callable

# Characters that are tokenized for each token that is needed, and in addition.
_FOR_EACH, _FOR_NONE = 16, 4_096
# Places at which a text is cut, to find out whether it matters.
_CUTS = 3


def end_characters(tokens: int) -> int:
    """Returns the number of characters at the end of a text that are tokenized first, for its last `tokens` tokens."""
    return _FOR_EACH * tokens + _FOR_NONE


def tokenised_characters(text: str, tokens: int) -> int:
    """Returns the number of characters that are usually tokenized for the last `tokens` tokens of a text."""
    return min(len(text), _CUTS * end_characters(tokens))


def last_ids(encode: Callable[[str], list[int]], text: str, tokens: int) -> list[int]:
    """Returns the last `tokens` ids, at most, that `encode` returns for the text.

    After a cut the first tokens differ from those of the whole text; from the next word, or sign, on they agree.
    Where three cuts, a character apart, lead to the same tokens through most of the end, any cut does: many tokenizers
    split digits three by three from the left, and two of three cuts may happen to agree. In a text without such places
    (one letter a million times) no cut may do: then more of it is tokenized, and all of it in the end.
    """
    size = end_characters(tokens)
    while 2 * size < len(text):
        ids, *others = (encode(text[-size - further :]) for further in range(_CUTS))
        if min(_same(ids, each) for each in others) >= max(tokens + 1, len(ids) * 3 // 4):
            return ids[-tokens:]
        size *= 4
    return encode(text)[-tokens:]


def _same(ids: list[int], others: list[int]) -> int:
    """Returns the number of last tokens that are the same."""
    pairs = zip(reversed(ids), reversed(others), strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(ids), len(others)))
