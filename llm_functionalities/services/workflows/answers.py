"""Extracts the usable parts of a model's answer: whole sentences that can be spoken, and JSON objects."""

import json
import re
from collections.abc import Callable
from typing import Any

# The most characters of an answer that are searched for speech and for JSON, and the most braces that are tried.
LONGEST_SPEECH = 8000
LONGEST_JSON = 20_000
MOST_ATTEMPTS = 50

# Characters before a full stop that may be an abbreviation.
LONGEST_WORD = 40

# Abbreviations and short words that may also end a sentence. They end it when a capital letter follows.
_LAST_WORDS_TOO = frozenset({"etc", "ft", "in", "lb", "lbs", "max", "min", "no", "oz", "pt", "qt", "st", "tbsp", "tsp"})

_ABBREVIATIONS = _LAST_WORDS_TOO | {"approx", "dr", "e.g", "i.e", "incl", "mr", "mrs", "ms", "pkg", "tbs", "temp", "vs"}

# Characters that may stand between the end of a sentence and the space after it.
CLOSING = "\"'\u201d\u2019\u00bb)]"

# Matches possessively and only at the beginning of a run of marks. Otherwise thousands of full stops take quadratic
# time.
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
_decoder = json.JSONDecoder()
_UNSPEAKABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffd]")


def speakable(text: str, *, sentences: int, characters: int) -> str:
    """Returns the first whole sentences of `text`: at most `sentences` of them, with `characters` characters in all.

    Leaves out markup, labels, control characters, all after the heading of another turn, repeated sentences, and an
    unfinished sentence at the end. Returns an empty text when no whole sentence fits.
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


def speech_parser(*, sentences: int, characters: int) -> Callable[[str], str | None]:
    """Returns a function that returns `speakable` of an answer; None if it is empty."""

    def parse(text: str) -> str | None:
        return speakable(text, sentences=sentences, characters=characters) or None

    return parse


def plain(text: str) -> str:
    """Returns `text` on one line without markup, up to where the model begins another turn."""
    own = _OWN_LABEL.sub("", text[:LONGEST_SPEECH])
    if turn := _OTHER_TURN.search(own):
        own = own[: turn.start()]
    own = _FORMATTING.sub("", own)
    own = " ".join(_UNSPEAKABLE.sub(" ", own).split())
    if len(own) > 1 and own[0] in "\"\u201c'" and own[-1] in "\"\u201d'":
        own = own[1:-1].strip()
    return own


def split(text: str) -> list[str]:
    """Splits one line of text into its whole sentences, without an unfinished sentence at the end."""
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
    """Returns True if a full stop does not end the sentence, because it belongs to an abbreviation, initial or number.

    before: text before the full stop. mark: the full stop, or other marks. following: the next character of the text.
    """
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


def first_object(text: str) -> dict[str, Any] | None:
    """Returns the first whole JSON object in `text`; None when there is none."""
    text = text[:LONGEST_JSON]
    start = text.find("{")
    for _ in range(MOST_ATTEMPTS):
        if start < 0:
            return None
        try:
            value, _ = _decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
        else:
            return value if isinstance(value, dict) else None
    return None


def words(value: Any, longest: int) -> str:
    """Returns a string or number of a JSON object on one line.

    Returns "" for other types, for unprintable characters, and for more than `longest` characters.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    try:
        line = " ".join(str(value).split())
    except ValueError:
        return ""  # a number with more digits than Python converts
    return line if len(line) <= longest and line.isprintable() else ""
