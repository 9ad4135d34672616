"""Finds out with which of several texts an incomplete text begins, may begin, or may end."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

BLANKS = " \n"


class Beginnings:
    """Finds which of many texts another text begins with, in a time that hardly depends on their number."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(texts)
        self._sorted = sorted(self._texts)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)

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
