"""Two readings of a JSON schema: JSON Schema's own, and the one of TGI, xgrammar and llama.cpp.

By the letter of JSON Schema, `{"properties": ...}` allows `null`, and every object may have further members. Engines
of structured output read `properties` as an object, and close objects that are not opened by `additionalProperties`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

CLOSED_OBJECTS, JSON_SCHEMA = "closed-objects", "json-schema"

# Keywords whose schemas constrain the same value, and keywords of which a part may hold without the whole.
_BRANCHES = ("allOf", "anyOf", "oneOf")
_CONDITIONS = ("not", "if", "then", "else", "dependentSchemas", "dependencies")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_BESIDE = (*_BRANCHES, *_CONDITIONS, *_REFERENCES)
_MEMBERS = frozenset({"properties", "required", "patternProperties", "additionalProperties", "minProperties", *_BESIDE})
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "prefixItems", "additionalItems", "additionalProperties", "contains", "unevaluatedItems")


def with_closed_objects(schema: Any) -> Any:
    """Returns a copy of the schema in which `properties` means an object, and objects that are not opened are closed.

    Where several parts of a schema speak of the same object, each is left open: closed, they would exclude each other.
    """
    return _closed(schema, "#", frozenset(_shared(schema)), shared=False)


def _closed(schema: Any, place: str, open_places: frozenset[str], *, shared: bool) -> Any:
    """shared: other parts of the schema speak of the same value."""
    if isinstance(schema, list):
        return [_closed(each, f"{place}/{i}", open_places, shared=False) for i, each in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    shared = shared or place in open_places
    own = dict(schema)
    for name in _SCHEMAS_BY_NAME:
        if isinstance(named := schema.get(name), dict):
            own[name] = {
                key: _closed(each, f"{place}/{name}/{key}", open_places, shared=False) for key, each in named.items()
            }
    own |= {
        name: _closed(schema[name], f"{place}/{name}", open_places, shared=False) for name in _SCHEMAS if name in schema
    }
    for name in _BRANCHES:
        if isinstance(branches := schema.get(name), list):
            beside = shared or _others_speak(schema, name)
            own[name] = [
                _closed(each, f"{place}/{name}/{i}", open_places, shared=beside) for i, each in enumerate(branches)
            ]
    return _object(own, shared=shared)


def _object(schema: dict[str, Any], *, shared: bool) -> dict[str, Any]:
    members = schema.get("properties")
    if not isinstance(members, dict):
        return schema
    if not {"type", "enum", "const"} & schema.keys():
        schema = {"type": "object", **schema}
    kinds = schema.get("type")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        return schema
    opened = {"additionalProperties", "unevaluatedProperties"} & schema.keys()
    beside = any(_speaks(schema[name]) for name in _BESIDE if name in schema)
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    needs_more = not isinstance(required, list) or not all(
        isinstance(name, str) and name in members for name in required
    )
    needs_more = needs_more or not isinstance(least, int | float) or least > len(members)
    return schema if shared or opened or beside or needs_more else {**schema, "additionalProperties": False}


def _others_speak(schema: Mapping[str, Any], name: str) -> bool:
    """Returns True if the schema says something of an object beside one of its lists of branches."""
    several = name == "allOf" and isinstance(schema[name], list) and len(schema[name]) > 1
    return several or not _MEMBERS.isdisjoint(schema.keys() - {name})


def _speaks(value: Any) -> bool:
    """Returns True for what may have members of its own: everything but lists of required names."""
    if isinstance(value, list):
        return any(map(_speaks, value))
    if isinstance(value, dict):
        return not value.keys() <= {"required"}
    return isinstance(value, str)


def _shared(schema: Any) -> Iterator[str]:
    """Yields the references to schemas that speak of an object together with others."""
    if isinstance(schema, list):
        for each in schema:
            yield from _shared(each)
    if not isinstance(schema, dict):
        return
    for name in _BRANCHES:
        if isinstance(branches := schema.get(name), list) and _others_speak(schema, name):
            yield from (branch["$ref"] for branch in branches if _refers(branch))
    yield from (each["$ref"] for each in map(schema.get, _CONDITIONS) if isinstance(each, dict) and _refers(each))
    if _refers(schema) and not _MEMBERS.isdisjoint(schema.keys() - {"$ref"}):
        yield schema["$ref"]
    for name, value in schema.items():
        if name not in ("enum", "const", "default", "examples"):
            yield from _shared(value)


def _refers(schema: Any) -> bool:
    return isinstance(schema, dict) and isinstance(schema.get("$ref"), str)
