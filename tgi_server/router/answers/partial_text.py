"""Texts of which a part has come: JSON, and texts that another one may begin or end with."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

BLANKS = " \n"
_STRUCTURE = re.compile(r'["\\{}\[\]]')
_AFTER_WORD = re.compile(r"[^\w.+-]")


class JsonReader:
    """Finds the end of a JSON value: of an object, an array or a text, or of a number or another word.

    Blanks before it are dropped. A word ends before the first character that cannot belong to it. ended: the end has
    been found.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._begun = False
        self.ended = False

    def read(self, text: str) -> tuple[str, str, bool]:
        """Returns what is certain of the value, what has to be read again or comes after it, and True at its end.

        text: what was left, and what has come since. A word is certain only as a whole.
        """
        if not self._begun:
            text = text.lstrip(BLANKS)
            if not text:
                return "", "", False
            if text[0] not in '{["':
                after = _AFTER_WORD.search(text)
                self.ended = after is not None
                return ("", text, False) if after is None else (text[: after.start()], text[after.start() :], True)
            self._begun = True
        end = self._end(text)
        self.ended = end is not None
        return (text, "", False) if end is None else (text[:end], text[end:], True)

    def _end(self, text: str) -> int | None:
        """Returns the place after the value's last character; None while it continues."""
        start = 0
        if self._escaped and text:
            start, self._escaped = 1, False
        while (found := _STRUCTURE.search(text, start)) is not None:
            start, sign = found.end(), found[0]
            if self._in_string:
                if sign == '"':
                    self._in_string = False
                elif sign == "\\":
                    self._escaped = start == len(text)
                    start += 1
            elif sign == '"':
                self._in_string = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
            if self._depth == 0 and not self._in_string:
                return start
        return None


class Beginnings:
    """Finds the one of many texts that another text begins with, in a time that hardly depends on their number."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(texts)
        self._sorted = sorted(self._texts)
        self._lengths = sorted({len(each) for each in self._texts}, reverse=True)

    def of(self, text: str) -> str | None:
        """Returns the one that `text` begins with, the longest if there are several; None if there is none."""
        return next((text[:length] for length in self._lengths if text[:length] in self._texts), None)

    @property
    def longest(self) -> int:
        """The length of the longest."""
        return self._lengths[0] if self._lengths else 0

    def may_follow(self, text: str) -> bool:
        """Returns True if one of them begins with `text`."""
        place = bisect_left(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)

    def may_grow(self, text: str) -> bool:
        """Returns True if one of them begins with `text` and is longer."""
        place = bisect_right(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)


def beginning_held(text: str, marker: str) -> int:
    """Returns the length of the longest end of `text` that begins `marker`."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)
