"""Truncation: finds the last tokens of a long text, usually by tokenizing only its end."""

from collections.abc import Callable

# Characters that are tokenized per token that is needed, and additional ones.
_FOR_EACH, _FOR_NONE = 16, 4_096
# Number of positions at which a text is cut, to find out if the position matters.
_CUTS = 3


def end_characters(tokens: int) -> int:
    """Returns the number of characters at the end of a text that are tokenized first, for its last `tokens` tokens."""
    return _FOR_EACH * tokens + _FOR_NONE


def tokenised_characters(text: str, tokens: int) -> int:
    """Returns the number of characters that are usually tokenized for the last `tokens` tokens of a text."""
    return min(len(text), _CUTS * end_characters(tokens))


def last_ids(encode: Callable[[str], list[int]], text: str, tokens: int) -> list[int]:
    """Returns the last `tokens` token ids, or fewer, of a text. encode: tokenizes a text.

    After a cut, the first tokens differ from those of the whole text; from the next word or punctuation mark on they
    agree. If three cuts, a character apart, lead to the same tokens through most of the end, the position of the cut
    does not matter. Three, because many tokenizers split digits into groups of three from the left. In some texts (one
    letter a million times) no cut may be found: then more is tokenized, and finally the whole text.
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
