"""Parses JSON that arrives in pieces: finds the end of a value, and the members of an object as they are complete."""

import re
from typing import NamedTuple

_WHITE_SPACE = " \t\r\n"
_STRUCTURE = re.compile(r'["\\{}\[\]]')
_AFTER_WORD = re.compile(r"[^\w.+-]")


class JsonReader:
    """Finds the end of a JSON value: of an object, an array or a text, or of a number or another word.

    White space before the value is dropped. A word ends before the first character that cannot belong to it. ended:
    True once the end has been found.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._begun = False
        self.ended = False

    def read(self, text: str) -> tuple[str, str, bool]:
        """Returns the text that belongs to the value, the rest, and True if the value has ended.

        text: the rest of the last call, and the text that has arrived since. A word is returned only as a whole.
        """
        if not self._begun:
            text = text.lstrip(_WHITE_SPACE)
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


class Member(NamedTuple):
    """A member of an object; name and value are JSON, as they were written."""

    name: str
    value: str


class MemberReader:
    """Finds the members of a JSON object that comes in pieces, each as soon as its value is complete.

    A text that is not an object has none. The members of objects within it belong to the values.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._sign = "{"  # the sign before the next name or value; empty: the object has ended, or there is none
        self._reader: JsonReader | None = None  # of the name or the value that has begun
        self._pieces: list[str] = []  # of this name or value
        self._name = ""

    def read(self, text: str) -> list[Member]:
        """Returns the members that `text` completes."""
        members: list[Member] = []
        self._rest += text
        while self._begin() and self._reader is not None:
            certain, self._rest, ended = self._reader.read(self._rest)
            self._pieces.append(certain)
            if not ended:
                break
            whole, self._pieces, self._reader = "".join(self._pieces), [], None
            if self._sign == ":":
                members.append(Member(self._name, whole))
                self._sign = ","
            else:
                self._name, self._sign = whole, ":"
        return members

    def _begin(self) -> bool:
        """Reads the sign before a name or a value. Returns False if it has not arrived, or if no member follows."""
        if self._reader is not None:
            return True
        self._rest = self._rest.lstrip(_WHITE_SPACE)
        if self._rest and not (self._sign and self._rest.startswith(self._sign)):
            self._sign = self._rest = ""
        if not self._rest:
            return False
        self._rest, self._reader = self._rest[1:], JsonReader()
        return True
