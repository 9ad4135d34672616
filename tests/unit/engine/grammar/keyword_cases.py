"""For each keyword of JSON Schema, schemas that use it, and instances that they allow or do not allow.

Groups have the shape of the official JSON-Schema-Test-Suite; the cases are this project's own.
"""

from collections.abc import Sequence
from typing import Any

Group = dict[str, Any]


def group(schema: Any, valid: Sequence[Any] = (), invalid: Sequence[Any] = ()) -> Group:
    tests = [{"data": data, "valid": True} for data in valid] + [{"data": data, "valid": False} for data in invalid]
    return {"schema": schema, "tests": tests}


def text_format(name: str, valid: Sequence[str], invalid: Sequence[str]) -> list[Group]:
    return [group({"type": "string", "format": name}, valid, invalid)]


_INTEGER = {"type": "integer"}
_A = {"properties": {"a": _INTEGER}}
_TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    },
}

ENFORCED: dict[str, list[Group]] = {
    "type": [
        group({"type": "integer"}, [0, -3, 12], ["1", None, [], {}, True]),
        group({"type": "number"}, [1, 1.5, -0.25, 1e5], ["1", None]),
        group({"type": "string"}, ["", "a", 'q"\\\n', "größe"], [1, None]),
        group({"type": "boolean"}, [True, False], [0, "true", None]),
        group({"type": "null"}, [None], [0, False, ""]),
        group({"type": "array"}, [[], [1, "a"]], [{}, "[]"]),
        group({"type": "object"}, [{}, {"a": [1]}], [[], 1]),
        group({"type": ["integer", "null"]}, [1, None], ["1", 1.5]),
    ],
    "enum": [
        group({"enum": [1, "a", None, [1], {"b": 2}]}, [1, "a", None, [1], {"b": 2}], [2, "b", [2], {}]),
        group({"type": "string", "enum": ["a", 1]}, ["a"], [1]),
    ],
    "const": [group({"const": {"a": [1, None]}}, [{"a": [1, None]}], [{"a": [1]}, 1])],
    "allOf": [group({"allOf": [_INTEGER, {"minimum": 3}]}, [3, 4], [2, "3"])],
    "anyOf": [
        group({"anyOf": [_INTEGER, {"type": "null"}]}, [1, None], ["a"]),
        group({"anyOf": [_INTEGER, {"type": "null"}], "maximum": 3}, [3, None], [4]),
    ],
    "oneOf": [
        group({"oneOf": [_INTEGER, {"type": "null"}]}, [1, None], ["a"]),
        group(
            {
                "oneOf": [
                    {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
                    for kind in ("cat", "dog")
                ]
            },
            [{"kind": "cat"}, {"kind": "dog"}],
            [{"kind": "cow"}, {}],
        ),
    ],
    "$ref": [group(_TREE, [{}, {"next": {"next": {}}}], [{"other": 1}, {"next": 1}])],
    "$defs": [group({"$ref": "#/$defs/a", "$defs": {"a": _INTEGER}}, [1], ["a"])],
    "definitions": [group({"$ref": "#/definitions/a", "definitions": {"a": _INTEGER}}, [1], ["a"])],
    "$anchor": [group({"$ref": "#a", "$defs": {"x": {"$anchor": "a", "type": "integer"}}}, [1], ["a"])],
    "$id": [group({"$id": "https://example.org/a", "type": "integer"}, [1], ["a"])],
    "$schema": [group({"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "integer"}, [1], ["a"])],
    "minLength": [group({"type": "string", "minLength": 2}, ["ab", "äö"], ["a", ""])],
    "maxLength": [group({"type": "string", "maxLength": 2}, ["", "ab"], ["abc"])],
    "pattern": [
        group({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["", "abd"]),
        group({"type": "string", "pattern": "[0-9]"}, ["a1b"], ["ab"]),
    ],
    "minimum": [group({"type": "integer", "minimum": 3}, [3, 100], [2, -5]), group({"minimum": 1}, ["a", 2], [0])],
    "maximum": [group({"type": "number", "maximum": 1.5}, [1.5, -3], [1.51, 2])],
    "exclusiveMinimum": [group({"type": "integer", "exclusiveMinimum": 3}, [4], [3])],
    "exclusiveMaximum": [group({"type": "integer", "exclusiveMaximum": 3}, [2], [3])],
    "multipleOf": [
        group({"type": "integer", "multipleOf": 5}, [0, 10, -15], [1, 12]),
        group({"type": "number", "multipleOf": 0.01}, [0.51, 3], [0.511]),
    ],
    "items": [
        group({"type": "array", "items": _INTEGER}, [[], [1, 2]], [["a"]]),
        group({"type": "array", "prefixItems": [_INTEGER], "items": False}, [[1]], [[1, 2]]),
    ],
    "prefixItems": [group({"type": "array", "prefixItems": [_INTEGER, {"type": "string"}]}, [[1, "a"], [1]], [["a"]])],
    "additionalItems": [group({"type": "array", "items": [_INTEGER], "additionalItems": False}, [[1]], [[1, 2]])],
    "minItems": [group({"type": "array", "items": _INTEGER, "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]])],
    "maxItems": [group({"type": "array", "items": _INTEGER, "maxItems": 1}, [[], [1]], [[1, 2]])],
    "properties": [group({"type": "object", **_A}, [{"a": 1}, {}, {"b": "x"}], [{"a": "1"}])],
    "required": [
        group({"type": "object", **_A, "required": ["a"]}, [{"a": 1}], [{}]),
        group({"type": "object", "required": ["z"]}, [{"z": 1}], [{}]),
    ],
    "additionalProperties": [
        group({"type": "object", **_A, "additionalProperties": False}, [{"a": 1}, {}], [{"b": 1}]),
        group({"type": "object", **_A, "additionalProperties": {"type": "null"}}, [{"a": 1, "b": None}], [{"b": 1}]),
    ],
    "patternProperties": [group({"type": "object", "patternProperties": {"^x": _INTEGER}}, [{"x1": 1}], [{"x1": "a"}])],
    "minProperties": [group({"type": "object", "minProperties": 1}, [{"a": 1}], [{}])],
    "maxProperties": [group({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 1}])],
    "uniqueItems: false": [group({"type": "array", "items": _INTEGER, "uniqueItems": False}, [[1, 1]], [["a"]])],
    "format: date": text_format(
        "date",
        ["2024-02-29", "2000-02-29", "1999-12-31"],
        ["2023-02-29", "1900-02-29", "2024-04-31", "0000-01-01", "2024-1-1"],
    ),
    "format: time": text_format(
        "time", ["12:00:00Z", "23:59:59.5+02:00"], ["24:00:00Z", "12:60:00Z", "12:00:00", "12:00:00+25:00"]
    ),
    "format: date-time": text_format(
        "date-time", ["2024-02-29T12:00:00Z"], ["2023-02-29T12:00:00Z", "2024-02-29", "2024-02-29 12:00:00Z"]
    ),
    "format: duration": text_format("duration", ["P1D", "PT4H5M", "P2W"], ["P", "1D", "P1S"]),
    "format: email": text_format("email", ["a@b.org", "a.b@c"], ["a", "a@", "a..b@c.org"]),
    "format: hostname": text_format("hostname", ["a", "a-b.org"], ["-a", "a_b", "a..b", "a" * 64]),
    "format: ipv4": text_format("ipv4", ["127.0.0.1"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "format: ipv6": text_format("ipv6", ["::1", "2001:db8::ff00:42:8329"], ["1::2::3", "12345::", "::1%eth0"]),
    "format: uri": text_format("uri", ["https://example.org/a?b#c", "urn:x:y"], ["//a", "a b", "http://a b"]),
    "format: uuid": text_format(
        "uuid",
        ["12345678-9abc-def0-1234-56789abcdef0"],
        ["12345678-9abc-def0-1234", "12345678-9abc-def0-1234-56789abcdefg"],
    ),
    "x-span": [
        group(
            {"type": "string", "x-span": True, "x-span-source": "the old oak"},
            ["old", "the old"],
            ["oa", "new", " old"],
        ),
        group({"x-span": "characters", "x-span-source": "oak"}, ["oa", "k"], ["ok", ""]),
    ],
    "x-span-source": [
        group({"type": ["string", "null"], "x-span": True, "x-span-source": "oak"}, ["oak", None], ["elm"])
    ],
    "x-hint": [
        group(
            {"type": "object", "properties": {"a": {"type": "integer", "x-hint": "of all"}}}, [{"a": 1}], [{"a": "x"}]
        )
    ],
}

ANNOTATIONS: dict[str, Any] = {
    "title": "A",
    "description": "what it is",
    "default": 1,
    "examples": [1],
    "$comment": "why",
    "deprecated": True,
    "readOnly": True,
    "writeOnly": True,
    "discriminator": {"propertyName": "kind"},
}
"""Keywords that say nothing about which instances are valid, and a value of each."""

REFUSED: dict[str, Any] = {
    "not": {"type": "integer"},
    "if": {"minimum": 3},
    "then": {"minimum": 3},
    "else": {"minimum": 3},
    "uniqueItems": True,
    "contains": {"type": "integer"},
    "minContains": 1,
    "maxContains": 1,
    "propertyNames": {"maxLength": 3},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "dependencies": {"a": ["b"]},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "contentEncoding": "base64",
    "contentMediaType": "application/json",
    "contentSchema": {},
    "$dynamicRef": "#a",
    "$dynamicAnchor": "a",
    "$recursiveRef": "#",
    "$recursiveAnchor": True,
    "$vocabulary": {},
    "nullable": True,
    "x-guidance": {},
    "any other": 1,
}
"""Keywords that would not be enforced, and a value of each."""

REFUSED_FORMATS = (
    *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex", "int32", "byte", "binary", "password"),
)
