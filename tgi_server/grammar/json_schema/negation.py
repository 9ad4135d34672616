"""Negates schemas: writes the negation as a schema without `not`, as far as that is possible."""

import re
from collections.abc import Sequence
from typing import Any

from tgi_server.grammar.json_schema.document import Document
from tgi_server.grammar.json_schema.keywords import (
    TYPES,
    Unenforceable,
    check_value,
    is_number,
    type_of,
)

Schema = Any
# Maximum number of schemas that are negated in one document: a larger grammar would be too complex.
_MAX_SCHEMAS = 1_000
_MAX_OPEN = 30
_MAX_VALUES = 200
_MAX_TEXT = 100
# For each bound: the type that it restricts, the keyword of its negation, and what to add to its value.
_COUNTS = {
    "minLength": ("string", "maxLength", -1),
    "minItems": ("array", "maxItems", -1),
    "minProperties": ("object", "maxProperties", -1),
    "maxLength": ("string", "minLength", 1),
    "maxItems": ("array", "minItems", 1),
    "maxProperties": ("object", "minProperties", 1),
}
_NUMBERS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_OPPOSABLE = {
    *("type", "const", "enum", "allOf", "anyOf", "not", "if", "$ref", "properties", "required", "contains", "pattern"),
    *(*_COUNTS, *_NUMBERS),
}
_REFUSED = {
    *("oneOf", "format", "multipleOf", "items", "prefixItems", "additionalItems", "uniqueItems", "minContains"),
    *("maxContains", "patternProperties", "additionalProperties", "propertyNames", "dependentRequired"),
    *("dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    "nullable",
}


class Negation:
    """Negates schemas. The results use keywords of JSON Schema, and still have to be translated."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._left = _MAX_SCHEMAS
        self._open: list[int] = []

    def opposite(self, schema: Schema) -> Schema:
        """Returns a schema of the values that `schema` forbids. Raises Unenforceable.

        The negation of the type integer has no numbers at all: numbers that are not integers cannot be expressed.
        """
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict):
            raise Unenforceable("contains something that is not a schema")
        self._left -= 1
        if self._left < 0:
            raise Unenforceable("has an opposite that is too large")
        if id(schema) in self._open or len(self._open) > _MAX_OPEN:
            raise Unenforceable("has an opposite that contains itself")
        self._open.append(id(schema))
        try:
            return _any(self._opposites(schema))
        finally:
            self._open.pop()

    def _opposites(self, schema: dict[str, Any]) -> list[Schema]:
        """Returns the negation of each keyword. A value that satisfies one of them is forbidden by the schema."""
        if "$ref" in schema and self._document.draft <= 7:
            schema = self._document.derived({"$ref": schema["$ref"]}, schema)
        found: list[Schema] = []
        for keyword, value in schema.items():
            check_value(keyword, value)
            if keyword in _REFUSED:
                raise Unenforceable(f"has {keyword!r} in it, which cannot be negated")
            if keyword in _OPPOSABLE:
                found += self._of(keyword, value, schema)
        return found

    def _of(self, keyword: str, value: Any, schema: dict[str, Any]) -> list[Schema]:
        match keyword:
            case "type":
                return [_other_types([value] if isinstance(value, str) else value)]
            case "const":
                return _other_values([value])
            case "enum":
                return _other_values(value)
            case "allOf":
                return [self.opposite(each) for each in value]
            case "anyOf":
                return [_all([self.opposite(each) for each in value])]
            case "not":
                return [value]
            case "if":
                return [
                    _all([value, self.opposite(schema.get("then", True))]),
                    _all([self.opposite(value), self.opposite(schema.get("else", True))]),
                ]
            case "$ref":
                return [self.opposite(self._document.resolve(schema, value)[0])]
            case "properties":
                return [
                    {"type": "object", "properties": {name: self.opposite(each)}, "required": [name]}
                    for name, each in value.items()
                    if each is not True and each != {}
                ]
            case "required":
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "contains":
                if "minContains" in schema or "maxContains" in schema:
                    raise Unenforceable("has a number of items in it, which cannot be negated")
                return [{"type": "array", "items": self.opposite(value)}]
            case "pattern":
                return [{"type": "string", "pattern": _other_pattern(value)}]
        return [_other_number(keyword, value, schema)]


def _any(schemas: Sequence[Schema]) -> Schema:
    possible = [schema for schema in schemas if schema is not False]
    if not possible:
        return False
    return possible[0] if len(possible) == 1 else {"anyOf": possible}


def _all(schemas: Sequence[Schema]) -> Schema:
    return False if any(schema is False for schema in schemas) else {"allOf": list(schemas)}


def _other_types(names: Sequence[str]) -> Schema:
    """Returns a schema of all types except these. If `names` has `integer`, numbers are left out altogether."""
    others = [name for name in TYPES if name not in names and not (name == "number" and "integer" in names)]
    return {"type": others} if others else False


def _other_values(values: Sequence[Any]) -> list[Schema]:
    """Returns schemas that together allow all values except these."""
    if len(values) > _MAX_VALUES or any(isinstance(value, list | dict) for value in values):
        raise Unenforceable("contains values, which cannot be negated")
    found: list[Schema] = []
    untouched = [name for name in TYPES if name not in set(map(type_of, values))]
    if untouched:
        found.append({"type": untouched})
    named = [value for value in values if isinstance(value, bool)]
    if named and (left := [value for value in (True, False) if value not in named]):
        found.append({"enum": left})
    if texts := [value for value in values if isinstance(value, str)]:
        found.append({"type": "string", "pattern": f"^({_other_texts(sorted(set(texts)))})$"})
    numbers = sorted({value for value in values if is_number(value)})
    if numbers:
        between = zip([None, *numbers], [*numbers, None], strict=True)
        found += [
            {
                "type": "number",
                **({} if low is None else {"exclusiveMinimum": low}),
                **({} if high is None else {"exclusiveMaximum": high}),
            }
            for low, high in between
        ]
    return found


def _other_texts(texts: Sequence[str]) -> str:
    """Returns a regular expression of all texts except these. texts: sorted."""
    heads: dict[str, list[str]] = {}
    if any(len(text) > _MAX_TEXT for text in texts):
        raise Unenforceable("contains a long text, which cannot be negated")
    for text in texts:
        if text:
            heads.setdefault(text[0], []).append(text[1:])
    first = "".join(map(_literal, heads))
    ways = [rf"[^{first}][\s\S]*" if first else r"[\s\S]+"]
    ways += [f"{_literal(head)}({_other_texts(rests)})" for head, rests in heads.items()]
    return "|".join(ways if "" in texts else ["", *ways])


def _literal(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"


_PLAIN_PATTERN = re.compile(r"\^?(?:[A-Za-z0-9_ -]|\\[.$/-])*\$?\Z")


def _other_pattern(pattern: str) -> str:
    """Returns the negation of a pattern that is a literal prefix (`^abc`) or a literal text (`^abc$`)."""
    if not _PLAIN_PATTERN.match(pattern) or not pattern.startswith("^"):
        raise Unenforceable("contains a pattern, which cannot be negated")
    text = pattern[1:].removesuffix("$").replace("\\", "")
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        return f"^({_other_texts([text])})$"
    if len(text) > _MAX_TEXT:
        raise Unenforceable("contains a long pattern, which cannot be negated")
    ways = [rf"{''.join(map(_literal, text[:i]))}([^{_literal(text[i])}][\s\S]*)?" for i in range(len(text))]
    return f"^({'|'.join(ways)})$" if ways else r"^[^\s\S]$"


def _other_number(keyword: str, value: Any, schema: dict[str, Any]) -> Schema:
    """Returns the negation of a bound."""
    if keyword in _NUMBERS:
        if isinstance(value, bool) or isinstance(schema.get(_EXCLUSIVE.get(keyword, "")), bool):
            raise Unenforceable("contains a bound of draft 4, which cannot be negated")
        return {"type": "number", _NUMBERS[keyword]: value}
    kind, opposite, step = _COUNTS[keyword]
    amount = int(value) + step
    return {"type": kind, opposite: amount} if amount >= 0 else False


_EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
