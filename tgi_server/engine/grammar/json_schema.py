"""JSON schemas: which keywords are enforced, and the form in which llguidance takes them.

llguidance passes over keywords that it does not know, so each is looked up here first: a keyword is enforced, or says
nothing about which texts are valid, or is refused by its name.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tgi_server.engine.grammar.errors import InvalidGrammar

# One layout, that of Python's json.dumps: whitespace is no choice of the model's, so it is forced and costs nothing.
ITEM_SEPARATOR = ", "
KEY_SEPARATOR = ": "
JSON_LAYOUT = {"item_separator": ITEM_SEPARATOR, "key_separator": KEY_SEPARATOR, "whitespace_flexible": False}

SPAN = "x-span"
SPAN_SOURCE = "x-span-source"
HINT = "x-hint"

ENFORCED = frozenset(
    {
        *("$ref", "$defs", "definitions", "$anchor", "$id", "$schema"),
        *("type", "enum", "const", "allOf", "anyOf", "oneOf"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
        *(SPAN, SPAN_SOURCE, HINT),
    }
)
ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"),
        "discriminator",  # OpenAPI: names the property by which `oneOf` and `anyOf` can be told apart
    }
)
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")

_SUBSCHEMA = ("items", "additionalItems", "additionalProperties")
_SUBSCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SUBSCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_MAX_DEPTH = 100

# llguidance's own dates know no leap years, and have a year 0.
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DATE = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OWN_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


def checked_schema(text: str) -> dict[str, Any]:
    """The schema that `text` is, every keyword checked, formats that llguidance takes too lightly made patterns.

    Raises InvalidGrammar that names the keyword, or the place, that is at fault.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(f"the JSON schema is not JSON: {error}") from error
    if schema is False:
        raise InvalidGrammar("nothing matches the JSON schema `false`")
    if schema is True:
        schema = {}
    checked: dict[str, Any] = _map_schema(schema, _checked, "#", 0)
    return checked


def is_annotated(schema: Any) -> bool:
    """Returns True if a span or a hint is anywhere in the schema."""
    return isinstance(schema, dict) and (
        SPAN in schema or HINT in schema or any(is_annotated(each) for _, each in subschemas(schema))
    )


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the place of each schema directly inside a schema, and the schema there."""
    for name in _SUBSCHEMA:
        if name in schema and not isinstance(schema[name], list):
            yield name, schema[name]
    for name in _SUBSCHEMA_LISTS:
        if isinstance(schema.get(name), list):
            yield from ((f"{name}/{index}", each) for index, each in enumerate(schema[name]))
    for name in _SUBSCHEMA_MAPS:
        if isinstance(schema.get(name), dict):
            yield from ((f"{name}/{key}", each) for key, each in schema[name].items())


def _map_schema(schema: Any, change: Callable[[dict[str, Any], str], dict[str, Any]], place: str, depth: int) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise InvalidGrammar(f"the JSON schema at {place} must be an object, not {json.dumps(schema)[:40]}")
    if depth > _MAX_DEPTH:
        raise InvalidGrammar(f"the JSON schema is nested more than {_MAX_DEPTH} levels deep")

    def inner(part: Any, name: str) -> Any:
        return _map_schema(part, change, f"{place}/{name}", depth + 1)

    changed = change(schema, place)
    for name in _SUBSCHEMA:
        if name in changed and not isinstance(changed[name], list):
            changed[name] = inner(changed[name], name)
    for name in _SUBSCHEMA_LISTS:
        if isinstance(changed.get(name), list):
            changed[name] = [inner(each, f"{name}/{index}") for index, each in enumerate(changed[name])]
    for name in _SUBSCHEMA_MAPS:
        if isinstance(changed.get(name), dict):
            changed[name] = {key: inner(each, f"{name}/{key}") for key, each in changed[name].items()}
    return changed


def _checked(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns the keywords of one schema, without those that say nothing about which texts are valid."""
    checked: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "uniqueItems" and value is False:
            continue
        if keyword in ANNOTATIONS:
            continue
        if keyword not in ENFORCED:
            raise InvalidGrammar(f"the JSON schema keyword {keyword!r} (at {place}) is not supported")
        checked[keyword] = value
    format_ = checked.get("format")
    if isinstance(format_, str) and format_ in _OWN_FORMATS:
        del checked["format"]
        others = checked.get("allOf", [])
        checked["allOf"] = [*(others if isinstance(others, list) else []), {"pattern": _OWN_FORMATS[format_]}]
    return checked
