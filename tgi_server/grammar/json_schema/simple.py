"""Recognizes JSON schemas that are cheap to compile: few subschemas, and only keywords that cost little."""

import json
import re
from math import inf
from typing import Any

from tgi_server.grammar.json_schema.translation import KEYWORDS

MAX_COST = 2_000
_MAX_BYTES = 20_000
_MAX_DEPTH = 16
_CHEAP = frozenset(
    {
        *("type", "enum", "const", "properties", "required", "additionalProperties", "items", "anyOf", "$ref"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("minLength", "maxLength", "minItems", "maxItems"),
    }
)
# A subschema with an identifier resolves references differently from the root, so identifiers are excluded, too.
_COSTLY = (KEYWORDS | {"$id", "id"}) - _CHEAP
# References without escaped characters.
_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")


def is_simple(text: str) -> bool:
    """Returns True if a JSON schema certainly needs little time, memory and stack to compile.

    It has no pattern, no recursion and no other keyword that may be costly, and the cost of its subschemas, counted as
    often as references and arrays repeat them, is at most MAX_COST.
    """
    if len(text) > _MAX_BYTES:
        return False
    try:
        root = json.loads(text)
        return _cost(root, root, {}, _MAX_DEPTH) <= MAX_COST
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return False  # the schema is invalid; its compilation reports the error


def _cost(schema: Any, root: Any, known: dict[int, float], depth: int) -> float:
    """Returns the cost of a schema, about one for each rule of its grammar; infinity if it is unknown.

    known: costs of the schemas seen so far, by `id`. depth: number of levels that it may still be nested.
    """
    if isinstance(schema, bool):
        return 4
    if not depth or not _COSTLY.isdisjoint(schema):
        return inf
    if id(schema) not in known:
        known[id(schema)] = inf  # for a schema that refers to itself
        known[id(schema)] = _own_cost(schema) + sum(
            times * _cost(each, root, known, depth - 1) for times, each in _parts(schema, root)
        )
    return known[id(schema)]


def _own_cost(schema: dict[str, Any]) -> float:
    said = [schema.get(keyword) for keyword in ("enum", "const", "required")]
    bounds = sum(keyword in schema for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
    lengths = max(0, *(schema.get(keyword, 0) for keyword in ("minLength", "maxLength")))
    return 1 + len(json.dumps(said)) / 16 + 8 * bounds + lengths / 8


def _parts(schema: dict[str, Any], root: Any) -> list[tuple[float, Any]]:
    """Returns (factor of its cost, schema) for each schema inside. Raises LookupError for an unusual reference."""
    items = max(2, *(schema.get(keyword, 0) for keyword in ("minItems", "maxItems")))
    parts: list[tuple[float, Any]] = [(1 + len(name) / 16, each) for name, each in schema.get("properties", {}).items()]
    parts += [(1, each) for each in schema.get("anyOf", ())]
    parts += [(1, schema["additionalProperties"])] if "additionalProperties" in schema else []
    parts += [(items, schema["items"])] if "items" in schema else []
    if "$ref" in schema:
        found = _REFERENCE.fullmatch(schema["$ref"])
        if found is None:
            raise LookupError(schema["$ref"])
        parts.append((1, root[found[1]][found[2]]))
    return parts
