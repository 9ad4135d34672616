"""Reads an answer as it is generated, as the model's `response_template` says."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tgi_server.router.answers.reader import AnswerPart, BodyReader, Piece
from tgi_server.router.answers.response_template import Mark, Region, ResponseTemplate, SearchBudget

# Characters of a text in which a mark may have begun, before it is taken for none.
_LONGEST_MARK = 10_000
_JSON_TYPES = frozenset({"integer", "number", "boolean", "null", "object", "array"})


@dataclass(frozen=True, order=True, slots=True)
class _FoundMark:
    """A mark in the text. The first counts; of those at one place the longest, and one that opens a region.

    minus_end: the negative place of its end. ends_region: it ends the open region.
    """

    start: int
    minus_end: int
    ends_region: bool
    name: str
    match: Any = field(compare=False)
    region: Region = field(compare=False)


class TemplatedReader(BodyReader):
    """Reads one answer, thoughts included. What may be the beginning of a mark is held back until it is certain.

    Calls come as a whole, at their end. A region that cannot be read as calls, or that calls no tool of the request, is
    text, and so is all that follows once the regular expressions of the template have taken too long. The parser of
    `transformers` has no such limit.
    """

    def __init__(
        self, template: ResponseTemplate, tools: Mapping[str, Any], begun: str, *, parallel: bool = True
    ) -> None:
        """tools: JSON schemas of their arguments, by name. begun: the beginning of the answer that the prompt has.

        parallel: there may be several calls; otherwise those after the first are dropped.
        """
        super().__init__()
        self._template = template
        self._parallel = parallel
        self._tools = tools
        self._allowance = SearchBudget()
        self._region = template.rest
        self._captures: dict[str, str] = {}
        self._text, self._place = "", 0
        self._raw = ""  # of a call: all of it, marks included
        self._body = ""
        self._blank: str | None = None  # held back: blanks at the end of a text; None: before its first character
        self._said: set[str] = set()  # regions that have been in the answer
        self._broken = False
        self.read(begun, last=False)

    @property
    def thinking(self) -> bool:
        return not self._broken and self._region is not None and self._region.part is AnswerPart.THOUGHT

    def read(self, text: str, *, last: bool) -> list[Piece]:
        if self.repeated:
            return []
        self._text += text
        pieces: list[Piece] = []
        try:
            if not self._broken:
                pieces += self._read(last=last)
        except TimeoutError:
            self._broken = True
            pieces.append(Piece(AnswerPart.TEXT, self._raw))
        if self._broken:
            pieces.append(Piece(AnswerPart.TEXT, self._text[self._place :]))
            self._place = len(self._text)
        return pieces

    def _read(self, *, last: bool) -> Iterator[Piece]:
        while not self.repeated:
            found, certain = self._next_mark(last=last)
            if found is None:
                yield from self._take(self._text[self._place : certain])
                self._place = max(certain, self._place)
                if last:
                    # A model may leave out the last mark; JSON that was cut off is none.
                    region = self._region
                    yield from self._close(whole=region is not None and (region.end is None or region.parser == "json"))
                return
            match, region = found
            yield from self._take(self._text[self._place : match.start()])
            self._place = match.end()
            if region is self._region:
                self._raw += match[0] if self._raw else ""
                yield from self._close(whole=True)
            else:
                yield from self._close(whole=True)
                self._open(region, match)

    def _next_mark(self, *, last: bool) -> tuple[tuple[Any, Region] | None, int]:
        """Returns the next mark and its region, if it is certain, and the place before which no other mark begins."""
        certain = len(self._text)
        found: list[_FoundMark] = []
        for mark, region in self._marks():
            match = self._allowance.spend(mark.pattern.search, self._text, self._place, partial=not last)
            if match is None or (match.start() == match.end() and region is self._region and not last):
                continue
            at_end = match.end() == len(self._text)
            if not last and (match.partial or (at_end and (mark.open_ended or match.start() == match.end()))):
                if len(self._text) - match.start() <= _LONGEST_MARK:
                    certain = min(certain, match.start())
            elif match.end() > self._place or match.end() > match.start():
                ends = region is self._region
                found.append(_FoundMark(match.start(), -match.end(), ends, region.name, match, region))
        first = min(found, default=None)
        return (None if first is None or first.start >= certain else (first.match, first.region)), certain

    def _marks(self) -> Iterator[tuple[Mark, Region]]:
        """Yields the marks that may come next: the end of a region, or the beginning of any."""
        rest = self._template.rest
        if self._region is not rest and self._region is not None:
            if self._region.end is not None:
                yield self._region.end, self._region
            return
        for region in self._template.regions:
            if region.begin is not None:
                yield region.begin, region
        if rest is not None and rest.end is not None:
            yield rest.end, rest

    def _open(self, region: Region, match: Any) -> None:
        self._region, self._raw = region, match[0] if region.part is AnswerPart.CALL else ""
        self._captures = {name: text for name, text in match.groupdict().items() if text is not None}

    def _take(self, text: str) -> Iterator[Piece]:
        """Takes a part of the body of a region, without the blanks around a text."""
        region = self._region
        if region is None or region.part is None or not text:
            return
        if region.part is AnswerPart.CALL:
            self._raw += text
            self._body += text
            return
        first = self._blank is None
        if region.settings.get("strip", True):
            text = text.lstrip() if self._blank is None else self._blank + text
            stripped = text.rstrip()
            if not stripped:
                self._blank = None if first else text
                return
            self._blank, text = text[len(stripped) :], stripped
        else:
            self._blank = ""
        joined = region.join if first and region.name in self._said else ""
        self._said.add(region.name)
        yield Piece(region.part, joined + text)

    def _close(self, *, whole: bool) -> Iterator[Piece]:
        """Ends a region. whole: its end has come."""
        region, raw, body, captures = self._region, self._raw, self._body, self._captures
        if region is not None and region.part is AnswerPart.CALL:
            try:
                made = _calls(region.value(body, captures, self._allowance), self._tools) if whole else []
            except (ValueError, LookupError, TypeError, AttributeError):
                made = []
            self._raw = ""
            for name, arguments in made if self._parallel else made[: 1 - self.calls]:
                text = json.dumps(arguments, ensure_ascii=False)
                if not self._is_new(name, text):
                    break
                yield Piece(AnswerPart.CALL, name, self.calls)
                yield Piece(AnswerPart.ARGUMENTS, text, self.calls)
                self.calls += 1
            if not made:
                yield Piece(AnswerPart.TEXT, raw)
        self._region, self._raw, self._body, self._captures = self._template.rest, "", "", {}
        self._blank = None


def _calls(value: Any, tools: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Returns names and arguments of calls; none where one of them is of no tool."""
    found = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call)
        name, arguments = function["name"], function.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if name not in tools or not isinstance(arguments, dict):
            return []
        schema = tools[name]
        members = schema.get("properties", {}) if isinstance(schema, dict) else {}
        found.append((name, {key: _of_type(each, members.get(key)) for key, each in arguments.items()}))
    return found


def _of_type(value: Any, schema: Any) -> Any:
    """Returns an argument as the type of its schema, of one that the model writes without types."""
    kinds = schema.get("type", ()) if isinstance(schema, dict) else ()
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if not isinstance(value, str) or not kinds & _JSON_TYPES:
        return value
    try:
        read = json.loads({"True": "true", "False": "false", "None": "null"}.get(value.strip(), value))
    except ValueError:
        return value
    return value if isinstance(read, str) or ("string" in kinds and not _fits(read, kinds)) else read


def _fits(value: Any, kinds: set[str]) -> bool:
    names = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"}
    name = names[type(value)]
    return name in kinds or (name == "integer" and "number" in kinds)
