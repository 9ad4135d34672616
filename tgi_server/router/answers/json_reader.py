"""A JSON value that comes in pieces."""

import re

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
