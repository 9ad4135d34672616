"""Arguments that a model writes one by one between tags, and their conversion to JSON.

A text stands between its tags as it is, and ends with the first closing tag. Everything else is JSON, on one line. As
Qwen3-Coder writes them, and as Gemma 4 does, where they are listed:

    <parameter=place>
    Paris
    </parameter>
    <parameter=days>
    [1, 2]
    </parameter>

    place:<|"|>Paris<|"|>,days:[1, 2]
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shared.partial_json import JsonReader
from tgi_server.router.answers.partial_text import BLANKS, Beginnings, beginning_held

_PLAIN_NAME = re.compile(r'[^<>%~/"\s]+')
_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"),
        "nullable",
    }
)
# Keywords of an object that say more of its members than which there are.
_OF_WHOLE_OBJECTS = frozenset(
    {
        *("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "enum"),
        *("const", "patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired"),
        *("dependentSchemas", "dependencies", "unevaluatedProperties", "nullable", "x-span"),
    }
)
_MOST_REFERENCES = 16
_NULL = "null"
# What a tag after a value begins with.
_IN_TAGS = re.compile(r"[\n<]")


@dataclass(frozen=True, slots=True)
class ArgumentTags:
    """The tags around an argument.

    begin: the texts before and after its name, in front of the value. begin_text: the same for strings, if they differ;
    null has the usual ones. end: the text after the value. separator: the text between arguments of a list; then only
    strings have an `end`, and if `end` is empty, strings are JSON, too. quote: the text in front of a string. words:
    JSON words that the model writes in another way.
    """

    begin: tuple[str, str]
    end: str
    separator: str = ""
    quote: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    begin_text: tuple[str, str] | None = None

    def tag(self, name: str, *, text: bool) -> str:
        """Returns the tag in front of an argument's value. text: the value is a text."""
        return name.join(self.begin_text if text and self.begin_text is not None else self.begin)

    @property
    def closing(self) -> str:
        """The text after a value, without the line breaks around it, which models leave out at times."""
        return self.end.strip("\n")

    @property
    def in_lines(self) -> bool:
        """True if a value stands on lines of its own: the breaks before and after it do not belong to it."""
        return self.begin[1].endswith("\n")

    @property
    def marks(self) -> tuple[str, ...]:
        """All fixed texts."""
        return (*self.begin, *(self.begin_text or ()), self.quote, self.end)


@dataclass(frozen=True, slots=True)
class TaggedParameter:
    """One parameter of a tool.

    text: its value is a text, one of `values` if there are any. nullable: or null. Otherwise the value is JSON.
    boolean: true or false.
    """

    name: str
    required: bool
    text: bool = False
    values: tuple[str, ...] = ()
    nullable: bool = False
    boolean: bool = False

    @property
    def as_json(self) -> "TaggedParameter":
        """The parameter with a value in JSON."""
        return replace(self, text=False, values=(), nullable=False)


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of one tool.

    place: JSON pointer to their schema. tagged: the arguments, if they are written one by one; None: one JSON object.
    """

    place: str
    tagged: Sequence[TaggedParameter] | None = None

    def place_of(self, parameter: TaggedParameter) -> str:
        """Returns the place of the schema of one of them."""
        return f"{self.place}/properties/{parameter.name}"

    @property
    def places(self) -> list[str]:
        """The places of the schemas of all that is JSON in them."""
        return [self.place] if self.tagged is None else [self.place_of(each) for each in self.tagged if not each.text]


def tagged_parameters(schema: Any) -> tuple[TaggedParameter, ...] | None:
    """Returns the parameters of a tool, in the order of the schema of its arguments; None where they are not enough.

    They are not where the schema asks more of an object than which members it has, or has names that fit no tag.
    """
    if schema is None:
        return ()
    if not isinstance(schema, dict) or _OF_WHOLE_OBJECTS & schema.keys() or schema.get("type", "object") != "object":
        return None
    members, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(members, dict) or not isinstance(required, list):
        return None
    if any(not isinstance(name, str) or name not in members for name in required):
        return None
    if not members and schema.get("additionalProperties"):
        return None
    needed = frozenset(required)
    if not all(_fits(name, member, name in needed) for name, member in members.items()):
        return None
    return tuple(
        _parameter(name, member, schema, required=name in needed)
        for name, member in members.items()
        if member is not False
    )


def _fits(name: str, member: Any, required: bool) -> bool:
    """Returns True for a member that can stand between tags."""
    hinted = isinstance(member, dict) and "x-hint" in member
    return _PLAIN_NAME.fullmatch(name) is not None and not hinted and not (required and member is False)


def _parameter(name: str, schema: Any, root: Mapping[str, Any], *, required: bool) -> TaggedParameter:
    read = _text(schema, root)
    if read is None:
        own = _followed(schema, root)
        boolean = isinstance(own, dict) and {key: own[key] for key in own.keys() - _ANNOTATIONS} == {"type": "boolean"}
        return TaggedParameter(name, required, boolean=boolean and not own.get("nullable"))
    values, nullable = read
    return TaggedParameter(name, required, text=True, values=values, nullable=nullable)


def _text(schema: Any, root: Mapping[str, Any]) -> tuple[tuple[str, ...], bool] | None:
    """Returns the values of a schema of texts, or none where any text fits, and True if it allows null besides.

    None: the schema is not one of texts, or asks more of them.
    """
    schema = _followed(schema, root)
    if not isinstance(schema, dict):
        return None
    nullable = schema.get("nullable") is True
    keywords = schema.keys() - _ANNOTATIONS
    if keywords == {"anyOf"} and isinstance(schema["anyOf"], list):
        others = [each for each in schema["anyOf"] if each != {"type": _NULL}]
        read = _text(others[0], root) if len(others) == 1 else None
        return None if read is None else (read[0], True)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(kind in ("string", _NULL) for kind in kinds):
        return None
    if keywords == {"type"} and "string" in kinds:
        return (), nullable or _NULL in kinds
    if keywords - {"type"} not in ({"enum"}, {"const"}) or (kinds and "string" not in kinds):
        return None
    listed = schema["enum"] if "enum" in keywords else [schema["const"]]
    values = [each for each in listed if each is not None] if isinstance(listed, list) else []
    if not values or not all(isinstance(value, str) and value and not _IN_TAGS.search(value) for value in values):
        return None
    may_be_null = None in listed and (not kinds or _NULL in kinds)
    return tuple(dict.fromkeys(values)), nullable or may_be_null


def _followed(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns what a reference within the document names; any other schema as it is."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, dict) or schema.keys() - _ANNOTATIONS != {"$ref"} or schema.get("nullable"):
            break
        reference = schema["$ref"]
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        schema = target
    return schema


class Tags:
    """The tags of the parameters of one tool, in a form."""

    def __init__(self, form: ArgumentTags, parameters: Sequence[TaggedParameter]) -> None:
        """Tags are looked up by their text before a line break. `rest` is the text after it, which all tags share."""
        self.form = form
        self.rest = form.begin[1].partition("\n")[2]
        named = {form.tag(parameter.name, text=parameter.text): parameter for parameter in parameters}
        if form.begin_text is not None:
            named |= {
                form.tag(parameter.name, text=False): parameter.as_json
                for parameter in parameters
                if parameter.nullable
            }
        self._parameters = {tag.partition("\n")[0]: each for tag, each in named.items()}
        self._beginnings = Beginnings(self._parameters)

    def of(self, text: str) -> tuple[str, TaggedParameter] | None:
        """Returns the tag that `text` begins with, and its parameter."""
        tag = self._beginnings.of(text)
        return None if tag is None else (tag, self._parameters[tag])

    def may_follow(self, text: str) -> bool:
        """Returns True if a tag begins with `text`."""
        return self._beginnings.may_follow(text)


class TaggedArgumentsReader:
    """Reads the arguments of one call as they come, as pieces of a JSON object."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._form = tags.form
        self._open: TaggedParameter | None = None
        self._in_text = self._line_read = False
        self._json: JsonReader | None = None
        self._before = "{"

    def read(self, text: str) -> tuple[str, str, bool]:
        """Returns the JSON that is certain, the text that cannot be read yet, and True at the end of the arguments.

        text: the text that could not be read at the last call, and the text that has come since.
        """
        pieces: list[str] = []
        while True:
            if self._open is None:
                separator = self._form.separator if self._before != "{" else ""
                seen = text if self._form.separator else text.lstrip(BLANKS)
                found = self._tags.of(seen.removeprefix(separator)) if seen.startswith(separator) else None
                if found is None:
                    ended = bool(seen) and not self._may_follow(seen, separator)
                    if ended:
                        pieces.append("{}" if self._before == "{" else "}")
                    return "".join(pieces), text, ended
                tag, parameter = found
                seen = seen.removeprefix(separator).removeprefix(tag)
                if self._tags.rest:
                    seen = seen.lstrip(BLANKS)
                    if not seen.startswith(self._tags.rest):
                        return "".join(pieces), text, False
                self._open, text = parameter, seen.removeprefix(self._tags.rest)
                pieces.append(f"{self._before}{json.dumps(self._open.name, ensure_ascii=False)}: ")
                self._before = ", "
            text = self._text(self._open, text, pieces) if self._open.text else self._value(text, pieces)
            if self._open is not None:
                return "".join(pieces), text, False

    def _may_follow(self, text: str, separator: str) -> bool:
        """Returns True if another argument may begin with `text`."""
        if len(text) < len(separator):
            return separator.startswith(text)
        return text.startswith(separator) and self._tags.may_follow(text.removeprefix(separator))

    def _text(self, parameter: TaggedParameter, text: str, pieces: list[str]) -> str:
        """Reads on in a text, and adds what is certain of it to `pieces`. Returns what is left to be read again.

        No parameter is open once the value has ended.
        """
        form = self._form
        if form.in_lines and not self._line_read:
            if not text:
                return text
            text, self._line_read = text.removeprefix("\n"), True
        if not self._in_text:
            nulls = (_NULL,) if form.separator else (_NULL + form.closing, f"{_NULL}\n{form.closing}")
            nullable = parameter.nullable and form.begin_text is None
            null = next((each for each in nulls if text.startswith(each)), None)
            if nullable and null is not None:
                pieces.append(_NULL)
                self._open, self._line_read = None, False
                return text.removeprefix(null)
            if nullable and any(each.startswith(text) for each in nulls):
                return text
            if not text.startswith(form.quote):
                return text
            text = text.removeprefix(form.quote)
            pieces.append('"')
            self._in_text = True
        value, end, rest = text.partition(form.closing)
        held = 0 if end else beginning_held(value, form.closing)
        held += form.in_lines and value[: len(value) - held].endswith("\n")
        pieces.append(json.dumps(value[: len(value) - held], ensure_ascii=False)[1:-1])
        if not end:
            return value[len(value) - held :]
        pieces.append('"')
        self._open, self._in_text, self._line_read = None, False, False
        return rest

    def _value(self, text: str, pieces: list[str]) -> str:
        """Reads on in a value in JSON as `_text` does in a text."""
        if self._json is None:
            self._json = JsonReader()
        if not self._json.ended:
            certain, text, _ = self._json.read(text)
            own = next((word for word, written in self._form.words.items() if written == certain), certain)
            pieces.append(own)
        end, seen = ("", text) if self._form.separator else (self._form.closing, text.lstrip(BLANKS))
        if not self._json.ended or not seen.startswith(end):
            return text
        self._open = self._json = None
        return seen.removeprefix(end)
