"""What a voice may say: whole sentences of a model's answer, and only so many."""

import re

LONGEST_ANSWER = 8000
"""Characters that are looked at: far more than anybody listens to."""

LONGEST_WORD = 40
"""Characters before a full stop that are looked at, to see whether it belongs to an abbreviation."""

_LAST_WORDS_TOO = frozenset({"etc", "ft", "in", "lb", "lbs", "max", "min", "no", "oz", "pt", "qt", "st", "tbsp", "tsp"})
"""Abbreviations, and short words, that may end a sentence as well: they do when a capital letter follows."""

_ABBREVIATIONS = _LAST_WORDS_TOO | {"approx", "dr", "e.g", "i.e", "incl", "mr", "mrs", "ms", "pkg", "tbs", "temp", "vs"}

CLOSING = "\"'\u201d\u2019\u00bb)]"
"""What may stand between the end of a sentence and the space after it."""

# Possessive, and only at the beginning of a run of marks: otherwise thousands of full stops take quadratic time.
_END = re.compile(rf"(?<![.!?\u2026])[.!?\u2026]++[{re.escape(CLOSING)}]*+(?=\s|$)")
_OTHER_TURN = re.compile(
    r"^[ \t]*#{2,}|<\|[a-z_]+\|>|</?s>|\[/?INST\]|^(?:user|human|input|instruction)[ \t]*:",
    re.IGNORECASE | re.MULTILINE,
)
_OWN_LABEL = re.compile(
    r"^\W*(?:assistant|agent|answer|response|output|summary|description|reply|ai|bot)\s*:\s*", re.IGNORECASE
)
_FORMATTING = re.compile(r"\*\*|__|`+|^[ \t]*(?:[-*\u2022]|\d+[.)])[ \t]+", re.MULTILINE)
_ORDINAL = re.compile(r"^\d+[.)]\s+")
_UNSPEAKABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff\ufffd]")


def speakable(text: str, *, sentences: int, characters: int) -> str:
    """The first whole sentences of `text`, at most `sentences` of them and `characters` long together.

    What is no speech is left out: markup, labels, control characters, headings that the model goes on with, repeated
    sentences, and an end that was cut off. Empty when no whole sentence fits.
    """
    said: list[str] = []
    length = -1
    for sentence in split(plain(text)):
        if sentence in said:
            continue
        length += 1 + len(sentence)
        if len(said) == sentences or length > characters:
            break
        said.append(sentence)
    return " ".join(said)


def plain(text: str) -> str:
    """`text` on one line without markup, up to where the model begins another turn."""
    own = _OWN_LABEL.sub("", text[:LONGEST_ANSWER])
    if turn := _OTHER_TURN.search(own):
        own = own[: turn.start()]
    own = _FORMATTING.sub("", own)
    own = " ".join(_UNSPEAKABLE.sub(" ", own).split())
    if len(own) > 1 and own[0] in "\"\u201c'" and own[-1] in "\"\u201d'":
        own = own[1:-1].strip()
    return own


def split(text: str) -> list[str]:
    """The whole sentences of one line of text; what follows the last of them is left out."""
    found = []
    start = 0
    for end in _END.finditer(text):
        before = text[max(start, end.start() - LONGEST_WORD) : end.start()]
        if _goes_on(before, end.group(), text[end.end() + 1 : end.end() + 2]):
            continue
        sentence = _ORDINAL.sub("", text[start : end.end()].strip())
        start = end.end()
        if any(character.isalnum() for character in sentence):
            found.append(sentence)
    return found


def _goes_on(before: str, mark: str, following: str) -> bool:
    """Whether the full stop belongs to a word, such as an abbreviation, and the sentence goes on."""
    if not mark.startswith(".") or mark.startswith("..") or not following:
        return False
    word = before.rsplit(None, 1)[-1].lstrip("(\"'") if before.strip() else ""
    if word.isdigit() and word == before.strip():
        return True  # "1. Chop the onions."
    if len(word) == 1 and word.isupper() and word != "I" and following.isupper():
        return True  # an initial
    word = word.lower()
    if word in _LAST_WORDS_TOO and following.isupper():
        return False
    return word in _ABBREVIATIONS
