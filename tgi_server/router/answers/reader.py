"""Reads an answer as it is generated: thoughts, text, and calls of tools with their arguments."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from tgi_server.router.answers.partial_text import beginning_held
from tgi_server.router.answers.reasoning import ReasoningTags


class AnswerPart(Enum):
    """The kinds of pieces that an answer has."""

    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"
    ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer. text: its text; for a CALL, the tool's name. call: the index of its call.

    id: the id that the model gave a CALL; empty: none.
    """

    part: AnswerPart
    text: str
    call: int = 0
    id: str = ""


class BodyReader:
    """Reads what comes after the thoughts: a text and calls, in one of the ways in which models write them.

    calls: the number of calls so far. repeated: the model has made one of them again, which is dropped with all that
    follows. in_arguments: the arguments of a call are not complete. thinking: thoughts have begun here, too.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.repeated = False
        self._earlier: list[tuple[str, str]] = []

    @property
    def in_arguments(self) -> bool:
        return False

    @property
    def thinking(self) -> bool:
        return False

    def read(self, text: str, *, last: bool) -> Iterable[Piece]:
        """Returns the pieces that are certain with `text`. last: nothing more comes."""
        raise NotImplementedError

    def _is_new(self, name: str, arguments: str) -> bool:
        """Notes a whole call. Returns False if it is equal to an earlier one, after which nothing is read."""
        self.repeated = (name, arguments) in self._earlier
        self._earlier.append((name, arguments))
        return not self.repeated


class TextReader(BodyReader):
    """Reads a body without calls."""

    def read(self, text: str, *, last: bool) -> Iterable[Piece]:
        return (Piece(AnswerPart.TEXT, text),)


class _AnswerState(Enum):
    """The states of a reader."""

    BEGINNING = auto()  # where thoughts may begin
    THOUGHT = auto()
    OPENING = auto()  # where a mark may stand before the text
    MESSAGE = auto()  # in a text after which other thoughts may come
    BODY = auto()


class AnswerReader:
    """Reads one answer. What may be the beginning of something else is held back until it is certain."""

    def __init__(self, body: BodyReader, thoughts: ReasoningTags | None = None, *, thinking: bool = False) -> None:
        """body: reads the answer after the reasoning. thoughts: the tags of the reasoning; None: there is no reasoning.

        thinking: the answer begins within the reasoning.
        """
        self._body = body
        self._thoughts = thoughts
        self._state = _AnswerState.BODY
        if thoughts is not None:
            self._state = _AnswerState.THOUGHT if thinking else _AnswerState.BEGINNING
        self._buffer = ""
        self._wrap: _Wrap | None = None  # of the answer, once thoughts have come before it
        self._trim = False

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self._body.calls

    @property
    def repeated(self) -> bool:
        """True once the model has made a call a second time, which is dropped with all that follows."""
        return self._body.repeated

    @property
    def thinking(self) -> bool:
        """True within thoughts."""
        return self._state is _AnswerState.THOUGHT or self._body.thinking

    @property
    def in_arguments(self) -> bool:
        """True while the arguments of a call are not complete."""
        return self._body.in_arguments

    def feed(self, text: str) -> list[Piece]:
        """Returns the pieces that are certain with `text`."""
        return self._pieces(text, last=False)

    def end(self) -> list[Piece]:
        """Returns the pieces that were held back, at the end of the answer."""
        return self._pieces("", last=True)

    def _pieces(self, text: str, *, last: bool) -> list[Piece]:
        self._buffer += text
        return [piece for piece in self._read(last=last) if piece.text or piece.part is AnswerPart.CALL]

    def _read(self, *, last: bool) -> Iterator[Piece]:
        state, thoughts = None, self._thoughts
        while state is not self._state and thoughts is not None:
            state = self._state
            match state:
                case _AnswerState.BEGINNING:
                    self._beginning(thoughts, last=last)
                case _AnswerState.THOUGHT:
                    yield from self._thought(thoughts, last=last)
                case _AnswerState.OPENING:
                    self._opening(thoughts, last=last)
                case _AnswerState.MESSAGE:
                    yield from self._message(thoughts, last=last)
        if self._state is _AnswerState.BODY:
            self._drop_lines()
            rest, self._buffer = self._buffer, ""
            yield from self._body.read(rest if self._wrap is None else self._wrap.within(rest, last=last), last=last)

    def _beginning(self, thoughts: ReasoningTags, *, last: bool) -> None:
        """Finds out if thoughts begin here."""
        seen = self._buffer.lstrip()
        if not last and thoughts.begin.startswith(seen):
            return
        self._state = _AnswerState.OPENING
        if seen.startswith(thoughts.begin):
            self._state, self._trim, self._buffer = _AnswerState.THOUGHT, True, seen.removeprefix(thoughts.begin)

    def _thought(self, thoughts: ReasoningTags, *, last: bool) -> Iterator[Piece]:
        self._drop_lines()
        thought, ended = self._until(thoughts.end, last=last)
        if ended:
            self._state, self._trim = _AnswerState.BEGINNING if thoughts.repeats else _AnswerState.OPENING, True
            self._wrap = _Wrap(*thoughts.around) if thoughts.around is not None else None
        yield Piece(AnswerPart.THOUGHT, thought)

    def _opening(self, thoughts: ReasoningTags, *, last: bool) -> None:
        """Drops what comes before a text that is the answer."""
        openings = (thoughts.opening, *thoughts.asides) if thoughts.opening else ()
        if any(opening.startswith(self._buffer) for opening in openings):
            self._buffer = "" if last else self._buffer
            return
        self._buffer = self._buffer.removeprefix(next(filter(self._buffer.startswith, openings), ""))
        plain = thoughts.repeats and isinstance(self._body, TextReader)
        self._state = _AnswerState.MESSAGE if plain else _AnswerState.BODY

    def _message(self, thoughts: ReasoningTags, *, last: bool) -> Iterator[Piece]:
        text, ended = self._until(thoughts.end, last=last)
        if ended:
            self._state = _AnswerState.BEGINNING
        yield Piece(AnswerPart.TEXT, text)

    def _until(self, end: str, *, last: bool) -> tuple[str, bool]:
        """Takes what is certain to come before `end`. Returns it, and True if the end has come."""
        text, ended, rest = self._buffer.partition(end)
        held = 0 if ended or last else beginning_held(text, end)
        self._buffer = rest if ended else text[len(text) - held :]
        return text[: len(text) - held], bool(ended)

    def _drop_lines(self) -> None:
        """Drops the line breaks at the beginning of thoughts, and between them and the answer."""
        if self._trim:
            self._buffer = self._buffer.lstrip("\n")
            self._trim = not self._buffer


class _Wrap:
    """Removes the marks that may stand around an answer, and the blanks next to them."""

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
