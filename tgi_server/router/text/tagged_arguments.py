"""Arguments that are written one by one between tags, and what is read from them as JSON.

A text stands between its tags as it is, and ends with the first closing tag. Everything else is JSON, on one line. As
Qwen3-Coder writes them:

    <parameter=place>
    Paris
    </parameter>
    <parameter=days>
    [1, 2]
    </parameter>
"""

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class ArgumentTags:
    """The tags around an argument. begin: the texts before and after its name, in front of the value. end: contains a
    line break, which no listed value contains."""

    begin: tuple[str, str]
    end: str

    def tag(self, name: str) -> str:
        """Returns the tag in front of an argument's value."""
        return name.join(self.begin)


@dataclass(frozen=True, slots=True)
class TaggedParameter:
    """One parameter of a tool.

    text: its value is a text, one of `values` if there are any. nullable: or null. Otherwise the value is JSON.
    """

    name: str
    required: bool
    text: bool = False
    values: tuple[str, ...] = ()
    nullable: bool = False


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
        return TaggedParameter(name, required)
    values, nullable = read
    return TaggedParameter(name, required, text=True, values=values, nullable=nullable)


def _text(schema: Any, root: Mapping[str, Any]) -> tuple[tuple[str, ...], bool] | None:
    """Returns the values of a schema of texts, or none where any text fits, and True if it allows null besides.

    None: it is no schema of texts, or one that asks more of them.
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
    if not values or not all(isinstance(each, str) and each and "\n" not in each for each in values):
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


class Beginnings:
    """Finds the one of many texts that another text begins with, in a time that hardly depends on their number."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(texts)
        self._sorted = sorted(self._texts)
        self._lengths = sorted({len(each) for each in self._texts})

    def of(self, text: str) -> str | None:
        """Returns the one that `text` begins with, the shortest if there are several; None if there is none."""
        return next((text[:length] for length in self._lengths if text[:length] in self._texts), None)

    def may_follow(self, text: str) -> bool:
        """Returns True if one of them begins with `text`."""
        place = bisect_left(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)


class Tags:
    """The tags of the parameters of one tool. end: the tag after each value."""

    def __init__(self, form: ArgumentTags, parameters: Sequence[TaggedParameter]) -> None:
        self.end = form.end
        self._parameters = {form.tag(each.name): each for each in parameters}
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
        self._open: TaggedParameter | None = None
        self._in_text = False
        self._before = "{"

    def read(self, text: str) -> tuple[str, str, bool]:
        """Returns JSON that is certain, what is left to be read once more has come, and True at the arguments' end.

        text: what was left, and what has come since.
        """
        pieces: list[str] = []
        while True:
            if self._open is None:
                found = self._tags.of(text)
                if found is None:
                    ended = bool(text) and not self._tags.may_follow(text)
                    if ended:
                        pieces.append("{}" if self._before == "{" else "}")
                    return "".join(pieces), text, ended
                tag, self._open = found
                text = text.removeprefix(tag)
                pieces.append(f"{self._before}{json.dumps(self._open.name, ensure_ascii=False)}: ")
                self._before = ", "
            text = self._value(self._open, text, pieces)
            if self._open is not None:
                return "".join(pieces), text, False

    def _value(self, parameter: TaggedParameter, text: str, pieces: list[str]) -> str:
        """Reads on in a value, and adds what is certain of it to `pieces`. Returns what is left to be read again.

        No parameter is open once the value has ended.
        """
        if parameter.text and not self._in_text:
            null = _NULL + self._tags.end
            if parameter.nullable and len(text) < len(null) and null.startswith(text):
                return text
            if parameter.nullable and text.startswith(null):
                pieces.append(_NULL)
                self._open = None
                return text.removeprefix(null)
            pieces.append('"')
            self._in_text = True
        value, end, rest = text.partition(self._tags.end)
        held = 0 if end else beginning_held(value, self._tags.end)
        certain = value[: len(value) - held]
        pieces.append(json.dumps(certain, ensure_ascii=False)[1:-1] if parameter.text else certain)
        if not end:
            return value[len(value) - held :]
        if parameter.text:
            pieces.append('"')
        self._open, self._in_text = None, False
        return rest


def beginning_held(text: str, marker: str) -> int:
    """Returns the length of the longest end of `text` that begins `marker`."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)
