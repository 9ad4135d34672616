"""The keywords of JSON Schema that restrict values, and the checks of the keywords' own values.

Every other keyword is an annotation and is ignored, as JSON Schema says of keywords that it does not know.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# One layout, that of Python's json.dumps: the model does not choose whitespace, so that jump-forward tokens cover it.
ITEM_SEPARATOR = ", "
KEY_SEPARATOR = ": "
# Without \u: llguidance would allow a name of `properties` to be written a second time with \u escapes, as if it were
# another name.
JSON_LAYOUT = {
    "item_separator": ITEM_SEPARATOR,
    "key_separator": KEY_SEPARATOR,
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
}

SPAN = "x-span"
SPAN_SOURCE = "x-span-source"
HINT = "x-hint"
LARK = "x-lark"
# The project's own keywords. A schema with one of them becomes a Lark grammar.
ANNOTATIONS = frozenset({SPAN, HINT, LARK})

TYPES = ("null", "boolean", "number", "string", "array", "object")
# Bounds are compared as floats, which represent all integers up to this one.
LARGEST_EXACT = 2**53
MAX_DEPTH = 100

# The keywords whose values are schemas, lists of schemas, and schemas by name.
_SUBSCHEMA = (
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_SUBSCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SUBSCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


class Unenforceable(Exception):
    """A keyword cannot be enforced. `str()` gives the reason, as the rest of a sentence that begins with the keyword.

    weaker: a schema that enforces a part of it. optional: True if the keyword is left to the model even where the
    schema is not lenient.
    """

    def __init__(self, reason: str, weaker: Any = True, *, optional: bool = False) -> None:
        super().__init__(reason)
        self.weaker = weaker
        self.optional = optional


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the relative JSON pointer of each schema directly inside `schema`, and that schema."""
    for name in _SUBSCHEMA:
        if name in schema and not isinstance(schema[name], list):
            yield name, schema[name]
    for name in _SUBSCHEMA_LISTS:
        if isinstance(schema.get(name), list):
            yield from ((f"{name}/{index}", each) for index, each in enumerate(schema[name]))
    for name in _SUBSCHEMA_MAPS:
        if isinstance(schema.get(name), dict):
            yield from ((f"{name}/{escaped(key)}", each) for key, each in schema[name].items())


def escaped(name: str) -> str:
    """Returns a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def check_value(keyword: str, value: Any) -> None:
    """Raises Unenforceable if the keyword cannot have this value."""
    expected = _EXPECTED.get(keyword)
    if expected is not None and not expected[0](value):
        raise Unenforceable(f"must be {expected[1]}, not {json.dumps(value, ensure_ascii=False)[:40]}")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def count(value: Any) -> int | None:
    """Returns a value that is a count as an int, such as 2 for 2.0; None for any other value."""
    return int(value) if is_number(value) and value >= 0 and value == value // 1 else None


def same(first: Any, second: Any) -> bool:
    """Returns True for equal JSON values: 1 equals 1.0, but not true."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(value, second[key]) for key, value in first.items())
    return bool(first == second)


def type_of(value: Any) -> str:
    """Returns the name of a JSON value's type, which is `number` for integers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    return "number" if is_number(value) else "array" if isinstance(value, list) else "object"


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_type(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list) and bool(names) and all(name in (*TYPES, "integer") for name in names)


_Expected = tuple[Callable[[Any], bool], str]
_COUNT: _Expected = (lambda value: count(value) is not None, "a whole number that is not negative")
_NUMBER: _Expected = (is_number, "a number")
_BOUND: _Expected = (lambda value: isinstance(value, bool) or is_number(value), "a number")
_TEXT: _Expected = (lambda value: isinstance(value, str), "a text")
_TEXTS: _Expected = (_is_list_of_texts, "a list of strings")
_SCHEMAS: _Expected = (lambda value: isinstance(value, list) and bool(value), "a list of schemas that is not empty")
_MAP: _Expected = (lambda value: isinstance(value, dict), "an object")
_EXPECTED: dict[str, _Expected] = {
    "type": (_is_type, f"the name of a type ({', '.join(TYPES)}, integer), or a list of such names"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values that is not empty"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("minContains", "maxContains"), _COUNT),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _BOUND),
    "multipleOf": (lambda value: is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("pattern", "$ref", "$dynamicRef", "$recursiveRef"), _TEXT),
    "required": _TEXTS,
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), _SCHEMAS),
    "prefixItems": (lambda value: isinstance(value, list), "a list of schemas"),
    **dict.fromkeys(("properties", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies"), _MAP),
}
