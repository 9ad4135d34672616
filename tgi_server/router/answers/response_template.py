"""The `response_template` of a model's tokenizer_config.json, which says how its answers are parsed.

An answer consists of regions. Each is a member of the message: its text (`content`), its thoughts, calls of tools, or
something that no interface has, which is dropped. A region begins and ends with marks, fixed texts or regular
expressions, and one of them may have no mark at its beginning: it has all that is outside the others. `transformers`
defines the form (`utils/chat_parsing`). Its parser is not used: its regular expressions have no time limit, and it
raises an error for a malformed answer, where this one returns text.

It does not become a format of `formats.py`, which would be longer: those have fixed texts, of which grammars are made,
and arguments as they come; here marks are regular expressions, and parsers and transforms make values of whole calls.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from time import thread_time
from typing import Any

import regex

from tgi_server.router.answers.reader import AnswerPart
from tgi_server.router.answers.reasoning import ReasoningTags

# CPU seconds that the regular expressions of a template may take for one answer, and for each of their searches in
# addition. They come from strangers.
ANSWER_SECONDS = 0.25
_SEARCH_SECONDS = 0.000_1
_CALLS = "tool_calls"
_PARTS = {
    "content": AnswerPart.TEXT,
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), AnswerPart.THOUGHT),
    _CALLS: AnswerPart.CALL,
}
_PARSERS = ("text", "int", "float", "bool", "json", "xml-inline", "kv-lines")
_PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
_BARE_NAME = regex.compile(r"([{,]\s*)([A-Za-z_]\w*)(?=\s*:)")
_JSON_TEXT = r'"(?:[^"\\]|\\.)*"'


class SearchBudget:
    """The CPU seconds that regular expressions may still take."""

    def __init__(self, seconds: float = ANSWER_SECONDS) -> None:
        self._left = seconds

    def spend(self, search: Any, *arguments: Any, **keywords: Any) -> Any:
        """Returns what a search with a time-out returns. Raises TimeoutError."""
        self._left += _SEARCH_SECONDS
        if self._left <= 0:
            raise TimeoutError
        started = thread_time()
        try:
            return search(*arguments, timeout=self._left, **keywords)
        finally:
            self._left -= thread_time() - started


@dataclass(frozen=True, slots=True)
class Mark:
    """The beginning or end of a region. open_ended: at the end of a text, a match may still become longer."""

    pattern: Any
    open_ended: bool
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """A kind of regions. part: the part of the answer; None: the region is dropped. parser, settings: how its body is
    parsed. transform: applied to the result.
    """

    name: str
    part: AnswerPart | None
    begin: Mark | None
    end: Mark | None
    parser: str = "text"
    settings: Mapping[str, Any] = field(default_factory=dict)
    join: str = ""
    transform: Any = None
    each: bool = False

    def value(self, body: str, captures: Mapping[str, str], allowance: SearchBudget) -> Any:
        """Returns the parsed body of a region. Raises ValueError, LookupError or TimeoutError."""
        value = _parsed(body, self.parser, self.settings, allowance)
        if self.transform is None:
            return value
        if self.each:
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                raise ValueError("it is not a list of objects")
            return [_transformed(self.transform, {**captures, **item}) for item in value]
        return _transformed(self.transform, {**captures, "content": value})


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """The regions of an answer. rest: the one without a mark at its beginning. anchor: where an answer begins."""

    regions: tuple[Region, ...]
    anchor: Mark
    rest: Region | None

    @classmethod
    def read(cls, spec: Any) -> "ResponseTemplate":
        """Returns the template of a specification. Raises ValueError if it is not one."""
        if not isinstance(spec, dict) or spec.get("version", 1) != 1:
            raise ValueError("it is not an object of version 1")
        fields = spec.get("fields")
        if not isinstance(fields, dict) or not fields:
            raise ValueError("it has no `fields`")
        regions = tuple(_region(name, each) for name, each in fields.items())
        rests = [region for region in regions if region.begin is None]
        anchor = _mark(spec, "start_anchor")
        if len(rests) > 1 or anchor is None:
            raise ValueError("it has several fields without `open`, or no `start_anchor`")
        return cls(regions, anchor, rests[0] if rests else None)

    @property
    def has_calls(self) -> bool:
        return any(region.part is AnswerPart.CALL for region in self.regions)

    @property
    def call_marks(self) -> list[tuple[Mark, Mark]]:
        """The beginnings and ends of calls. Nothing follows one without an end."""
        marks = ((region.begin, region.end) for region in self.regions if region.part is AnswerPart.CALL)
        return [(begin, end) for begin, end in marks if begin is not None and end is not None]

    @property
    def marks(self) -> str:
        """The texts and patterns of all marks, in which special tokens are looked up."""
        marks = [
            mark.pattern.pattern for region in self.regions for mark in (region.begin, region.end) if mark is not None
        ]
        settings = [json.dumps(region.settings, ensure_ascii=False) for region in self.regions]
        return "".join([*marks, *settings]).replace("\\", "")

    @property
    def thoughts(self) -> ReasoningTags | None:
        """The texts around thoughts, where they are always the same."""
        for region in self.regions:
            if region.part is AnswerPart.THOUGHT and region.begin is not None and region.end is not None:
                begins, ends = region.begin.texts, region.end.texts
                return ReasoningTags(begins[0], ends[0]) if len(begins) == len(ends) == 1 else None
        return None

    def begun(self, prompt: str) -> str:
        """Returns the beginning of the answer that the prompt contains. Raises TimeoutError."""
        ends = [found.end() for found in _matches(self.anchor.pattern, prompt, SearchBudget())]
        return prompt[ends[-1] :] if ends else ""


def _region(name: str, spec: Any) -> Region:
    if not isinstance(spec, dict):
        raise ValueError(f"`{name}` is not an object")
    parser, settings, join = spec.get("content", "text"), spec.get("content_args", {}), spec.get("join")
    if parser not in _PARSERS or not isinstance(settings, dict) or not isinstance(join, str | None):
        raise ValueError(f"`{name}` has a `content`, `content_args` or `join` that is not known")
    begin, end = _mark(spec, "open"), _mark(spec, "close")
    transform, each = spec.get("transform"), spec.get("transform_each", False)
    return Region(name, _PARTS.get(name), begin, end, parser, settings, join or "", transform, each is True)


def _mark(spec: Mapping[str, Any], name: str) -> Mark | None:
    """Returns the mark that is called so: one text, several, or a regular expression. Raises ValueError."""
    texts, pattern = spec.get(name), spec.get(f"{name}_pattern")
    if pattern is not None:
        try:
            return Mark(regex.compile(pattern, regex.DOTALL), open_ended=True)
        except (regex.error, TypeError) as error:
            raise ValueError(f"`{name}_pattern` is not a regular expression: {error}") from error
    if texts is None:
        return None
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"`{name}` is neither a text nor a list of texts")
    ordered = sorted(set(texts), key=len, reverse=True)
    open_ended = any(one.startswith(other) for one, other in permutations(ordered, 2))
    return Mark(regex.compile("|".join(map(regex.escape, ordered))), open_ended, tuple(ordered))


def _parsed(text: str, parser: str, settings: Mapping[str, Any], allowance: SearchBudget) -> Any:
    """Returns a text as parsed by a parser. Raises ValueError, LookupError or TimeoutError."""
    stripped = text.strip() if settings.get("strip", True) else text
    match parser:
        case "int":
            return int(stripped)
        case "float":
            return float(stripped)
        case "bool":
            return stripped.lower() in ("true", "1")
        case "json":
            return _json(text, settings, allowance)
        case "xml-inline":
            pairs = (
                (each["key"], each["value"])
                for each in _matches(regex.compile(settings["tag_pattern"], regex.DOTALL), text, allowance)
            )
            return _object(pairs, settings, allowance)
        case "kv-lines":
            lines = (line.partition(settings.get("kv_sep", ":")) for line in text.split(settings.get("line_sep", "\n")))
            return _object(((key.strip(), value.strip()) for key, sep, value in lines if sep), settings, allowance)
    return stripped


def _matches(pattern: Any, text: str, allowance: SearchBudget) -> Iterator[Any]:
    """Yields the matches in a text. Raises TimeoutError."""
    place = 0
    while place <= len(text) and (found := allowance.spend(pattern.search, text, place)) is not None:
        yield found
        place = found.end() + (found.end() == found.start())


def _object(pairs: Iterator[tuple[str, str]], settings: Mapping[str, Any], allowance: SearchBudget) -> dict[str, Any]:
    inner = settings.get("value_parser")
    found: dict[str, Any] = {}
    for key, text in pairs:
        value = text if inner is None else _parsed(text, inner.get("name", "text"), inner.get("args", {}), allowance)
        if key in found and settings.get("merge_duplicates"):
            earlier = found[key] if isinstance(found[key], list) else [found[key]]
            found[key] = [*earlier, value]
        else:
            found[key] = value
    return found


def _json(text: str, settings: Mapping[str, Any], allowance: SearchBudget) -> Any:
    """Parses JSON whose strings may have other marks than quotes, and whose names may have no quotes."""
    marks = [(regex.escape(begin), regex.escape(end)) for begin, end in settings.get("string_delims", ())]
    texts = "|".join([*(f"{begin}(.*?){end}" for begin, end in marks), _JSON_TEXT])
    written, place = [], 0

    def plain(part: str) -> str:
        return _BARE_NAME.sub(r'\1"\2"', part) if settings.get("unquoted_keys") else part

    for found in _matches(regex.compile(texts, regex.DOTALL), text, allowance):
        own = next((each for each in found.groups() if each is not None), None)
        written += [plain(text[place : found.start()]), found[0] if own is None else json.dumps(own)]
        place = found.end()
    try:
        return json.loads("".join([*written, plain(text[place:])]))
    except ValueError:
        if settings.get("allow_non_json"):
            return text.strip()
        raise


def _transformed(transform: Any, values: Mapping[str, Any]) -> Any:
    """Returns the transform with values in the places of their names. Raises LookupError or TypeError."""
    if isinstance(transform, dict):
        return {key: _transformed(each, values) for key, each in transform.items()}
    if isinstance(transform, list):
        return [_transformed(each, values) for each in transform]
    named = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if named is None:
        return transform
    value: Any = values
    for key in named[1].split("."):
        value = value[key]
    return value
