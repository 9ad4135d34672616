"""Takes an answer apart as it is generated: thoughts, text, and calls of tools with their arguments."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import regex

from tgi_server.router.answers.formats import (
    JSON_FORMAT,
    NUMBER,
    TEXT_ARGUMENTS,
    TEXT_BETWEEN,
    ToolFormat,
    json_name,
)
from tgi_server.router.answers.json_reader import BLANKS, JsonReader
from tgi_server.router.answers.reasoning import ReasoningTags
from tgi_server.router.answers.tagged_arguments import (
    Arguments,
    Beginnings,
    TaggedArgumentsReader,
    Tags,
    beginning_held,
)

# The number of a call, complete or not.
_NUMBER = re.compile(r":\d+(?=<|\Z)")
# White space where a form has a line break, or none.
_BREAK = re.compile(r"\n[ \n]*")
_LONGEST_NUMBER = 16
_JSON_STRING = re.compile(r'"([^"\\]|\\.)*"')
_TEXT_ARGUMENTS = regex.compile(TEXT_ARGUMENTS)


class AnswerPart(Enum):
    """The kinds of pieces that an answer has."""

    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"
    ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer. text: of a CALL, the name of the tool. call: which of the calls it belongs to.

    id: of a CALL, the one that the model gave it; empty: none.
    """

    part: AnswerPart
    text: str
    call: int = 0
    id: str = ""


class CallHeads:
    """The heads of calls in one form: made once for all answers to a request, which may have thousands of tools."""

    def __init__(self, form: ToolFormat, arguments: Mapping[str, Arguments], *, as_text: bool = False) -> None:
        """arguments: of the tools, by name. as_text: an answer that is nothing but the JSON of calls has them, too."""
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


class AnswerReader:
    """Reads one answer. What may be the beginning of something else is held back until it is certain."""

    def __init__(self, calls: CallHeads | None, thoughts: ReasoningTags | None, *, thinking: bool) -> None:
        """calls: of tools; None: there are none. thoughts: what stands around them; None: they are text.

        thinking: the answer begins within thoughts.
        """
        self._buffer = ""
        self._thoughts = thoughts
        self._calls = _CallReader(calls) if calls is not None else None
        self._thinking = thinking and thoughts is not None
        self._may_think = thoughts is not None and not thinking
        self._openings = (thoughts.opening, *thoughts.asides) if thoughts is not None and thoughts.opening else ()
        self._opens = bool(self._openings)
        self._wrap: _Wrap | None = None  # of the answer, once thoughts have come before it
        self._trim = False

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self._calls.number if self._calls is not None else 0

    @property
    def repeated(self) -> bool:
        """True once the model has made a call a second time, which is dropped with all that follows."""
        return self._calls is not None and self._calls.repeated

    @property
    def thinking(self) -> bool:
        """True within thoughts."""
        return self._thinking

    @property
    def in_arguments(self) -> bool:
        """True while the arguments of a call are not complete."""
        return self._calls is not None and self._calls.in_arguments

    def feed(self, text: str) -> list[Piece]:
        """Returns the pieces that are certain with `text`."""
        return [piece for piece in self._read(text, last=False) if piece.text or piece.part is AnswerPart.CALL]

    def end(self) -> list[Piece]:
        """Returns what was held back, once nothing more comes."""
        return [piece for piece in self._read("", last=True) if piece.text or piece.part is AnswerPart.CALL]

    def _read(self, text: str, *, last: bool) -> Iterator[Piece]:
        self._buffer += text
        while True:
            if self._may_think and self._thoughts is not None:
                begin, seen = self._thoughts.begin, self._buffer.lstrip()
                if not last and begin.startswith(seen):
                    return
                self._may_think = False
                if seen.startswith(begin):
                    self._thinking, self._trim, self._buffer = True, True, seen.removeprefix(begin)
            if self._thinking and self._thoughts is not None:
                self._drop_lines()
                thought, end, rest = self._buffer.partition(self._thoughts.end)
                held = 0 if end or last else beginning_held(thought, self._thoughts.end)
                self._buffer = rest if end else thought[len(thought) - held :]
                yield Piece(AnswerPart.THOUGHT, thought[: len(thought) - held])
                if not end:
                    return
                self._thinking, self._trim, self._may_think = False, True, self._thoughts.repeats
                self._wrap = _Wrap(*self._thoughts.around) if self._thoughts.around is not None else None
            elif self._opens and any(each.startswith(self._buffer) for each in self._openings):
                self._buffer = "" if last else self._buffer
                return
            elif self._thoughts is not None and self._thoughts.repeats and self._calls is None:
                yield from self._message(self._thoughts.end, last=last)
                if not self._may_think:
                    return
            else:
                break
        self._open()
        self._drop_lines()
        rest, self._buffer = self._buffer, ""
        if self._wrap is not None:
            rest = self._wrap.within(rest, last=last)
        if self._calls is None:
            yield Piece(AnswerPart.TEXT, rest)
        else:
            yield from self._calls.read(rest, last=last)

    def _drop_lines(self) -> None:
        """Drops the line breaks at the beginning of thoughts, and between them and the answer."""
        if self._trim:
            self._buffer = self._buffer.lstrip("\n")
            self._trim = not self._buffer

    def _open(self) -> None:
        """Drops what comes before a text that is the answer."""
        if self._opens:
            found = next((each for each in self._openings if self._buffer.startswith(each)), "")
            self._buffer, self._opens = self._buffer.removeprefix(found), False

    def _message(self, end: str, *, last: bool) -> Iterator[Piece]:
        """Reads a text after which there may be thoughts, and other texts, as after a thought."""
        self._open()
        said, ended, rest = self._buffer.partition(end)
        held = 0 if ended or last else beginning_held(said, end)
        self._buffer = rest if ended else said[len(said) - held :]
        self._may_think = self._opens = bool(ended)
        yield Piece(AnswerPart.TEXT, said[: len(said) - held])


class _Wrap:
    """Takes away the marks that may stand around an answer, and the blanks within them."""

    def __init__(self, begin: str, end: str) -> None:
        self._begin, self._end = begin, end
        self._buffer = ""
        self._first = True
        self._open = False

    def within(self, text: str, *, last: bool) -> str:
        """Returns what is certain with `text`. last: nothing more comes."""
        self._buffer += text
        if self._first:
            seen = self._buffer.lstrip()
            if not last and self._begin.startswith(seen):
                return ""
            self._first, self._open = False, seen.startswith(self._begin)
            self._buffer = seen.removeprefix(self._begin).lstrip("\n") if self._open else self._buffer
        certain, self._buffer = self._buffer, ""
        if not self._open:
            return certain
        if last:
            return certain.rstrip().removesuffix(self._end).rstrip()
        # Blanks, the mark, and more blanks may be the end.
        stripped = certain.rstrip().removesuffix(self._end).rstrip()
        held = beginning_held(stripped, self._end)
        shown = stripped[: len(stripped) - held].rstrip()
        self._buffer = certain[len(shown) :]
        return shown


class _ReaderPlace(Enum):
    """The places in an answer at which a reader of calls can be."""

    BEGINNING = "before anything is known"
    TEXT_HEAD = "behind the name of a call that is written as a text"
    TEXT = "before the first call"
    FIRST_HEAD = "behind the trigger"
    ARGUMENTS = "within arguments"
    TAIL = "behind arguments"
    BETWEEN = "behind a call"
    TEXT_BETWEEN = "behind a call that is written as a text"
    NEXT_HEAD = "behind what stands between calls"
    PLAIN = "in a text in which no call comes"


class _CallReader:
    """Reads text with calls of one form. number: of the calls so far.

    A call that may turn out to be equal to an earlier one is held back until it differs. repeated: one was equal.
    """

    def __init__(self, heads: CallHeads) -> None:
        self._heads = heads
        self._form = self._called = heads.form
        self._place = _ReaderPlace.TEXT if heads.as_text is None else _ReaderPlace.BEGINNING
        self._buffer = self._trigger = ""
        self._reader: JsonReader | TaggedArgumentsReader = JsonReader()
        self.number = 0
        self.repeated = False
        self._earlier: list[tuple[str, str]] = []
        self._name = self._arguments_so_far = ""
        self._as_text = False  # the calls are written as a text
        self._held: list[Piece] = []

    @property
    def in_arguments(self) -> bool:
        return self._place is _ReaderPlace.ARGUMENTS

    def read(self, text: str, *, last: bool) -> Iterator[Piece]:
        """Yields the pieces that are certain with `text`. last: nothing more comes."""
        self._buffer += text
        place = None
        while place is not self._place and not self.repeated:
            place = self._place
            match place:
                case _ReaderPlace.BEGINNING:
                    self._beginning(last=last)
                case _ReaderPlace.TEXT_HEAD:
                    yield from self._text_head(last=last)
                case _ReaderPlace.TEXT:
                    yield from self._text(last=last)
                case _ReaderPlace.FIRST_HEAD:
                    yield from self._head(self._heads.first, self._heads.firsts, last=last)
                case _ReaderPlace.ARGUMENTS:
                    yield from self._arguments()
                case _ReaderPlace.TAIL:
                    self._tail()
                case _ReaderPlace.BETWEEN:
                    self._between()
                case _ReaderPlace.TEXT_BETWEEN:
                    self._text_between()
                case _ReaderPlace.NEXT_HEAD:
                    yield from self._head(self._heads.next, self._heads.nexts, last=last)
                case _ReaderPlace.PLAIN:
                    rest, self._buffer = self._buffer, ""
                    yield Piece(AnswerPart.TEXT, rest)
        if last:
            yield from self._released()

    def _beginning(self, *, last: bool) -> None:
        """Finds out if the answer begins with the JSON of a call, alone or in a fence."""
        assert self._heads.as_text is not None
        found = self._heads.as_text.match(self._buffer, partial=True)
        if found is None or not found.partial or last:
            self._place = _ReaderPlace.TEXT
            self._named(found)

    def _text_between(self) -> None:
        """Finds the name of the next call; what else there is ends the answer."""
        self._named(self._heads.next_as_text.match(self._buffer, partial=True))

    def _named(self, found: "regex.Match[str] | None") -> None:
        """Takes the name of a call that is written as a text, if it is that of a tool."""
        if found is not None and not found.partial and (name := json.loads(found["name"])) in self._heads.names:
            self._name, self._trigger, self._buffer = name, found[0], self._buffer[found.end() :]
            self._place, self._as_text = _ReaderPlace.TEXT_HEAD, True

    def _text_head(self, *, last: bool) -> Iterator[Piece]:
        found = _TEXT_ARGUMENTS.match(self._buffer, partial=True)
        if found is not None and not found.partial:
            yield from self._begin(self._name, JSON_FORMAT, JsonReader())
            self._buffer = self._buffer[found.end() :]
        elif self.number == 0 and (found is None or last):
            self._buffer, self._place = self._trigger + self._buffer, _ReaderPlace.PLAIN

    def _begin(
        self, name: str, form: ToolFormat, reader: "JsonReader | TaggedArgumentsReader", identity: str = ""
    ) -> Iterator[Piece]:
        """Begins a call, with its arguments. identity: its id, which the model gave it."""
        self._name, self._arguments_so_far = name, ""
        self._held.append(Piece(AnswerPart.CALL, name, self.number, identity))
        self.number += 1
        if not self._may_repeat():
            yield from self._released()
        self._called, self._reader, self._place = form, reader, _ReaderPlace.ARGUMENTS

    def _text(self, *, last: bool) -> Iterator[Piece]:
        trigger = self._form.trigger
        if not self._form.anywhere:
            begin = self._heads.layouts.match(self._buffer)
            if begin is not None and begin.end() < len(self._buffer):
                self._trigger, self._buffer = begin[0], self._buffer[begin.end() :]
                self._place = _ReaderPlace.FIRST_HEAD
            elif last or self._heads.layouts_begun.fullmatch(self._buffer) is None:
                self._place = _ReaderPlace.PLAIN
            return
        before, found, rest = self._buffer.partition(trigger)
        held = 0 if found or last else beginning_held(before, trigger)
        if found:
            # The lines before a call are no text.
            yield Piece(AnswerPart.TEXT, before.rstrip())
            self._trigger, self._buffer, self._place = trigger, rest, _ReaderPlace.FIRST_HEAD
            return
        blank = 0 if last else len(before[: len(before) - held]) - len(before[: len(before) - held].rstrip())
        held += blank
        self._buffer = before[len(before) - held :]
        yield Piece(AnswerPart.TEXT, before[: len(before) - held])

    def _head(self, names: Mapping[str, str], heads: Beginnings, *, last: bool) -> Iterator[Piece]:
        """Reads up to the arguments of a call. Behind a trigger there may also be a text that only looks like one."""
        # A call that has named its tool is no text, even if it is cut off here.
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
            self._buffer = _behind(self._buffer, length)
        elif self._place is _ReaderPlace.FIRST_HEAD and (ended or not heads.may_follow(seen)):
            self._buffer, self._place = self._trigger + self._buffer, _ReaderPlace.PLAIN

    def _arguments(self) -> Iterator[Piece]:
        certain, self._buffer, ended = self._reader.read(self._buffer)
        self._arguments_so_far += certain
        self._held.append(Piece(AnswerPart.ARGUMENTS, certain, self.number - 1))
        call = (self._name, self._arguments_so_far)
        if ended:
            self._place = _ReaderPlace.TAIL
            if call in self._earlier:
                self.repeated, self._held = True, []
                self.number -= 1
                return
            self._earlier.append(call)
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
            self._buffer = _behind(self._buffer.lstrip(BLANKS), length)
            self._place = _ReaderPlace.TEXT_BETWEEN if self._as_text else _ReaderPlace.BETWEEN

    def _between(self) -> None:
        seen, separator = self._buffer.lstrip(BLANKS), self._heads.separator
        if seen.startswith(separator) and seen.removeprefix(separator).lstrip(BLANKS):
            self._buffer, self._place = seen.removeprefix(separator).lstrip(BLANKS), _ReaderPlace.NEXT_HEAD


def _joined(text: str, most: int) -> str:
    """Returns the beginning of a text without the white space around line breaks: `most` characters, or some more."""
    pieces, size, start = [], 0, 0
    for found in _BREAK.finditer(text):
        pieces.append(text[start : min(found.start(), start + most + 1)])
        size, start = size + len(pieces[-1]), found.end()
        if size > most:
            return "".join(pieces)
    return "".join([*pieces, text[start : start + most + 1]])


def _behind(text: str, size: int) -> str:
    """Returns what comes after the first `size` characters of a text that are not white space around line breaks."""
    while (found := _BREAK.search(text)) is not None and found.start() < size:
        size -= found.start()
        text = text[found.end() :]
    return text[size:]
