"""JSON schemas of many shapes, all of which can be satisfied."""

from typing import Any

from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema

Schema = dict[str, Any]

_NAMES = ("name", "a", "total cost", 'quo"te', "größe")
_FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
_PATTERNS = ("^[a-z]{1,4}$", "^(yes|no)$", "[0-9]", "^x", "^[A-Z][a-z]*$")


def _bounded(kind: str, low: str, high: str) -> st.SearchStrategy[Schema]:
    return st.tuples(st.integers(-20, 20), st.integers(0, 30)).map(
        lambda pair: {"type": kind, low: pair[0], high: pair[0] + pair[1] + 2}
    )


def _strings() -> st.SearchStrategy[Schema]:
    sizes = st.tuples(st.integers(0, 3), st.integers(0, 8)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[0] + pair[1]}
    )
    formats = st.sampled_from(_FORMATS).map(lambda name: {"type": "string", "format": name})
    patterns = st.sampled_from(_PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern})
    return st.one_of(sizes, formats, patterns)


def _scalars() -> st.SearchStrategy[Schema]:
    values = st.lists(
        st.one_of(st.integers(-5, 5), st.booleans(), st.none(), st.text('abc\n"é', max_size=4)), min_size=1, max_size=4
    )
    return st.one_of(
        _strings(),
        _bounded("integer", "minimum", "maximum"),
        _bounded("number", "exclusiveMinimum", "maximum"),
        st.integers(2, 7).map(lambda n: {"type": "integer", "multipleOf": n, "minimum": 0, "maximum": 100}),
        values.map(lambda chosen: {"enum": chosen}),
        values.map(lambda chosen: {"const": chosen[0]}),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}]),
    )


def _objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def close(members: dict[str, Schema], required: set[str], closed: bool) -> Schema:
        schema: Schema = {"type": "object", "properties": members, "required": sorted(required & set(members))}
        return {**schema, "additionalProperties": False} if closed else schema

    members = st.dictionaries(st.sampled_from(_NAMES), inner, min_size=1, max_size=3)
    return st.builds(close, members, st.sets(st.sampled_from(_NAMES)), st.sampled_from([True, True, True, False]))


def _arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )


def _choices(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})


SCHEMAS = st.recursive(
    _scalars(), lambda inner: st.one_of(_objects(inner), _arrays(inner), _choices(inner)), max_leaves=5
)


def values_of(schema: Schema) -> st.SearchStrategy[Any]:
    """Values that one of these schemas allows, the members of objects in its order."""
    if "anyOf" in schema:
        return st.sampled_from(schema["anyOf"]).flatmap(values_of)
    if "properties" in schema:
        members = {name: values_of(value) for name, value in schema["properties"].items()}
        chosen = st.sets(st.sampled_from(sorted(members))).map(lambda names: names | set(schema["required"]))
        return chosen.flatmap(
            lambda names: st.tuples(*(st.tuples(st.just(name), members[name]) for name in members if name in names))
        ).map(dict)
    if "items" in schema:
        return st.lists(values_of(schema["items"]), min_size=schema["minItems"], max_size=schema["maxItems"])
    return from_schema(schema)


def _distinguished(variants: list[Schema]) -> Schema:
    """Variants with a member of their own, which may be missing."""
    return {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": place}, "value": each}, "additionalProperties": False}
            for place, each in enumerate(variants)
        ]
    }


def _conditional(condition: Schema, met: Schema, unmet: Schema) -> Schema:
    return {"if": condition, "then": met, "else": unmet}


def _members(members: dict[str, Schema], least: int, most: int, needs: list[str]) -> Schema:
    limits = {"minProperties": least, "maxProperties": least + most, "dependentRequired": {needs[0]: needs[1:]}}
    return {"type": "object", "properties": members, **limits}


# Simple ones, which can be negated.
_PLAIN = st.one_of(
    _bounded("integer", "minimum", "maximum"),
    st.sampled_from([{"type": "string"}, {"type": "boolean"}, {"type": ["null", "integer"]}, {"type": "object"}]),
    st.lists(st.one_of(st.integers(-3, 3), st.text("ab", max_size=3), st.booleans()), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from(_NAMES).map(lambda name: {"required": [name]}),
    st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda pair: {"minLength": pair[0], "maxItems": pair[1]}),
)

# Schemas whose keywords are said in other ones.
LOGICAL_SCHEMAS = st.one_of(
    st.lists(SCHEMAS, min_size=2, max_size=3).map(_distinguished),
    st.lists(_PLAIN, min_size=2, max_size=3).map(lambda variants: {"oneOf": variants}),
    st.tuples(SCHEMAS, _PLAIN).map(lambda pair: {**pair[0], "not": pair[1]}),
    st.builds(_conditional, _PLAIN, SCHEMAS, SCHEMAS),
    st.builds(
        _members,
        st.dictionaries(st.sampled_from(_NAMES), SCHEMAS, max_size=4),
        st.integers(0, 2),
        st.integers(0, 2),
        st.lists(st.sampled_from(_NAMES), min_size=1, max_size=3),
    ),
    st.tuples(_PLAIN, SCHEMAS, st.integers(0, 2)).map(
        lambda parts: {"type": "array", "contains": parts[0], "items": parts[1], "minContains": parts[2], "maxItems": 4}
    ),
    st.tuples(_PLAIN, st.integers(1, 2)).map(
        lambda parts: {"type": "array", "contains": parts[0], "maxContains": parts[1], "maxItems": 4}
    ),
    _scalars().map(lambda items: {"type": "array", "items": items, "uniqueItems": True, "maxItems": 3}),
    st.tuples(_strings(), _scalars()).map(
        lambda parts: {"type": "object", "propertyNames": parts[0], "additionalProperties": parts[1]}
    ),
)
