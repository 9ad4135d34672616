"""Reads text with calls of tools in one of the known forms, as it is generated."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from enum import Enum

import regex

from shared.partial_json import JsonReader
from tgi_server.router.answers.formats import (
    JSON_FORMAT,
    NUMBER,
    TEXT_ARGUMENTS,
    TEXT_BETWEEN,
    ToolFormat,
    json_name,
)
from tgi_server.router.answers.partial_text import BLANKS, Beginnings, beginning_held
from tgi_server.router.answers.reader import AnswerPart, BodyReader, Piece
from tgi_server.router.answers.tagged_arguments import Arguments, TaggedArgumentsReader, Tags

# The number of a call, complete or not.
_NUMBER = re.compile(r":\d+(?=<|\Z)")
# White space where a form has a line break, or none.
_BREAK = re.compile(r"\n[ \n]*")
_LONGEST_NUMBER = 16
_JSON_STRING = re.compile(r'"([^"\\]|\\.)*"')
_TEXT_ARGUMENTS = regex.compile(TEXT_ARGUMENTS)


class CallHeads:
    """Patterns of the heads of calls in one form. Made once per request, because it may have thousands of tools."""

    def __init__(self, form: ToolFormat, arguments: Mapping[str, Arguments], *, as_text: bool = False) -> None:
        """arguments: the tools' arguments by tool name. as_text: see `frame.Calls`."""
        self.form = form
        name = json_name(arguments)
        self.as_text = regex.compile(form.text_layouts + name) if as_text else None
        self.next_as_text = regex.compile(TEXT_BETWEEN + name)
        self.separator = form.separator.strip()
        self.first = {_BREAK.sub("", form.of(each).first_head(name)): name for name, each in arguments.items()}
        self.next = {_BREAK.sub("", form.of(each).call_head(name)): name for name, each in arguments.items()}
        self.firsts, self.nexts = Beginnings(self.first), Beginnings(self.next)
        self.layouts, self.layouts_begun = re.compile(form.layouts), re.compile(form.layouts_begun)
        self._called = {name: form.of(each) for name, each in arguments.items()}
        self._tags = {
            name: Tags(form.tags, each.tagged)
            for name, each in arguments.items()
            if form.tags is not None and each.tagged is not None
        }

    @property
    def names(self) -> Collection[str]:
        """The names of the tools."""
        return self._called

    def form_of(self, name: str) -> ToolFormat:
        """Returns the form of the calls of a tool."""
        return self._called[name]

    def reader(self, name: str) -> "JsonReader | TaggedArgumentsReader":
        """Returns what reads the arguments of a call."""
        tags = self._tags.get(name)
        return JsonReader() if tags is None else TaggedArgumentsReader(tags)


class _CallState(Enum):
    """The states of a reader of calls."""

    BEGINNING = "before anything is known"
    TEXT_HEAD = "after the name of a call that is written as a text"
    TEXT = "before the first call"
    FIRST_HEAD = "after the trigger"
    ARGUMENTS = "within arguments"
    TAIL = "after arguments"
    BETWEEN = "after a call"
    TEXT_BETWEEN = "after a call that is written as a text"
    NEXT_HEAD = "after the separator of calls"
    PLAIN = "in a text in which no call comes"


class CallReader(BodyReader):
    """Reads text with calls of one form.

    A call that may turn out to be equal to an earlier one is held back until it differs.
    """

    def __init__(self, heads: CallHeads) -> None:
        super().__init__()
        self._heads = heads
        self._form = self._called = heads.form
        self._state = _CallState.TEXT if heads.as_text is None else _CallState.BEGINNING
        self._buffer = self._trigger = ""
        self._reader: JsonReader | TaggedArgumentsReader = JsonReader()
        self._name = self._arguments_so_far = ""
        self._as_text = False  # the calls are written as a text
        self._held: list[Piece] = []

    @property
    def in_arguments(self) -> bool:
        return self._state is _CallState.ARGUMENTS

    def read(self, text: str, *, last: bool) -> Iterator[Piece]:
        self._buffer += text
        state = None
        while state is not self._state and not self.repeated:
            state = self._state
            match state:
                case _CallState.BEGINNING:
                    self._beginning(last=last)
                case _CallState.TEXT_HEAD:
                    yield from self._text_head(last=last)
                case _CallState.TEXT:
                    yield from self._text(last=last)
                case _CallState.FIRST_HEAD:
                    yield from self._head(self._heads.first, self._heads.firsts, last=last)
                case _CallState.ARGUMENTS:
                    yield from self._arguments()
                case _CallState.TAIL:
                    self._tail()
                case _CallState.BETWEEN:
                    self._between()
                case _CallState.TEXT_BETWEEN:
                    self._text_between()
                case _CallState.NEXT_HEAD:
                    yield from self._head(self._heads.next, self._heads.nexts, last=last)
                case _CallState.PLAIN:
                    rest, self._buffer = self._buffer, ""
                    yield Piece(AnswerPart.TEXT, rest)
        if last:
            yield from self._released()

    def _beginning(self, *, last: bool) -> None:
        """Finds out if the answer begins with the JSON of a call, alone or in a fence."""
        assert self._heads.as_text is not None
        found = self._heads.as_text.match(self._buffer, partial=True)
        if found is None or not found.partial or last:
            self._state = _CallState.TEXT
            self._named(found)

    def _text_between(self) -> None:
        """Finds the name of the next call; what else there is ends the answer."""
        self._named(self._heads.next_as_text.match(self._buffer, partial=True))

    def _named(self, found: "regex.Match[str] | None") -> None:
        """Takes the name of a call that is written as a text, if it is that of a tool."""
        if found is not None and not found.partial and (name := json.loads(found["name"])) in self._heads.names:
            self._name, self._trigger, self._buffer = name, found[0], self._buffer[found.end() :]
            self._state, self._as_text = _CallState.TEXT_HEAD, True

    def _text_head(self, *, last: bool) -> Iterator[Piece]:
        found = _TEXT_ARGUMENTS.match(self._buffer, partial=True)
        if found is not None and not found.partial:
            yield from self._begin(self._name, JSON_FORMAT, JsonReader())
            self._buffer = self._buffer[found.end() :]
        elif self.calls == 0 and (found is None or last):
            self._buffer, self._state = self._trigger + self._buffer, _CallState.PLAIN

    def _begin(
        self, name: str, form: ToolFormat, reader: "JsonReader | TaggedArgumentsReader", identity: str = ""
    ) -> Iterator[Piece]:
        """Begins a call, with its arguments. identity: its id, which the model gave it."""
        self._name, self._arguments_so_far = name, ""
        self._held.append(Piece(AnswerPart.CALL, name, self.calls, identity))
        self.calls += 1
        if not self._may_repeat():
            yield from self._released()
        self._called, self._reader, self._state = form, reader, _CallState.ARGUMENTS

    def _text(self, *, last: bool) -> Iterator[Piece]:
        trigger = self._form.trigger
        if not self._form.anywhere:
            begin = self._heads.layouts.match(self._buffer)
            if begin is not None and begin.end() < len(self._buffer):
                self._trigger, self._buffer = begin[0], self._buffer[begin.end() :]
                self._state = _CallState.FIRST_HEAD
            elif last or self._heads.layouts_begun.fullmatch(self._buffer) is None:
                self._state = _CallState.PLAIN
            return
        before, found, rest = self._buffer.partition(trigger)
        held = 0 if found or last else beginning_held(before, trigger)
        if found:
            # The lines before a call are not part of the text.
            yield Piece(AnswerPart.TEXT, before.rstrip())
            self._trigger, self._buffer, self._state = trigger, rest, _CallState.FIRST_HEAD
            return
        blank = 0 if last else len(before[: len(before) - held]) - len(before[: len(before) - held].rstrip())
        held += blank
        self._buffer = before[len(before) - held :]
        yield Piece(AnswerPart.TEXT, before[: len(before) - held])

    def _head(self, names: Mapping[str, str], heads: Beginnings, *, last: bool) -> Iterator[Piece]:
        """Reads up to the arguments of a call. A trigger may also be followed by a text that only looks like one."""
        # A call that has named its tool is not a text, even if it is cut off here.
        ended = last and not self._form.anywhere and _JSON_STRING.match(self._buffer) is None
        seen, number = _joined(self._buffer, heads.longest + _LONGEST_NUMBER), ""
        if self._form.numbered and (numbered := _NUMBER.search(seen)) is not None:
            number, seen = numbered[0], f"{seen[: numbered.start()]}:{NUMBER}{seen[numbered.end() :]}"
        found = None if heads.may_grow(seen) else heads.of(seen)
        if found is not None:
            name = names[found]
            identity = f"functions.{name}{number}" if number else ""
            yield from self._begin(name, self._heads.form_of(name), self._heads.reader(name), identity)
            length = len(found) + (len(number) - len(f":{NUMBER}") if number else 0)
            self._buffer = _after(self._buffer, length)
        elif self._state is _CallState.FIRST_HEAD and (ended or not heads.may_follow(seen)):
            self._buffer, self._state = self._trigger + self._buffer, _CallState.PLAIN

    def _arguments(self) -> Iterator[Piece]:
        certain, self._buffer, ended = self._reader.read(self._buffer)
        self._arguments_so_far += certain
        self._held.append(Piece(AnswerPart.ARGUMENTS, certain, self.calls - 1))
        if ended:
            self._state = _CallState.TAIL
            if not self._is_new(self._name, self._arguments_so_far):
                self._held = []
                self.calls -= 1
                return
        if ended or not self._may_repeat():
            yield from self._released()

    def _may_repeat(self) -> bool:
        """Returns True if the open call may still turn out to be equal to an earlier one."""
        return any(
            name == self._name and arguments.startswith(self._arguments_so_far) for name, arguments in self._earlier
        )

    def _released(self) -> Iterator[Piece]:
        """Yields what was held back."""
        held, self._held = self._held, []
        yield from held

    def _tail(self) -> None:
        tail = self._called.tail.strip("\n")
        joined, length = _joined(self._buffer.lstrip(BLANKS), len(tail)), len(_BREAK.sub("", tail))
        if joined[:length] == _BREAK.sub("", tail):
            self._buffer = _after(self._buffer.lstrip(BLANKS), length)
            self._state = _CallState.TEXT_BETWEEN if self._as_text else _CallState.BETWEEN

    def _between(self) -> None:
        seen, separator = self._buffer.lstrip(BLANKS), self._heads.separator
        if seen.startswith(separator) and seen.removeprefix(separator).lstrip(BLANKS):
            self._buffer, self._state = seen.removeprefix(separator).lstrip(BLANKS), _CallState.NEXT_HEAD


def _joined(text: str, most: int) -> str:
    """Returns the beginning of a text without the white space around line breaks: `most` characters, or some more."""
    pieces, size, start = [], 0, 0
    for found in _BREAK.finditer(text):
        pieces.append(text[start : min(found.start(), start + most + 1)])
        size, start = size + len(pieces[-1]), found.end()
        if size > most:
            return "".join(pieces)
    return "".join([*pieces, text[start : start + most + 1]])


def _after(text: str, size: int) -> str:
    """Returns what comes after the first `size` characters of a text that are not white space around line breaks."""
    while (found := _BREAK.search(text)) is not None and found.start() < size:
        size -= found.start()
        text = text[found.end() :]
    return text[size:]
