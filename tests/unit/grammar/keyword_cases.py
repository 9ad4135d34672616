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

_DYNAMIC_TREE = {
    "$dynamicAnchor": "node",
    "type": "object",
    "properties": {"next": {"$dynamicRef": "#node"}},
    "additionalProperties": False,
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
    "minimum": [
        group({"type": "integer", "minimum": 3}, [3, 100], [2, -5]),
        group({"minimum": 1}, ["a", 2], [0]),
        group({"type": "number", "minimum": -1e300}, [-1.5, 10**30], [-1e301]),
        group({"minimum": -float(2**63 - 2**10)}, [-1.5, 2], [-1e301]),
    ],
    "maximum": [
        group({"type": "number", "maximum": 1.5}, [1.5, -3], [1.51, 2]),
        group({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [-3, 2**62], [2**63, -(2**64)]),
        group({"type": "integer", "minimum": 0, "maximum": 10**400}, [0, 2**62], [-1]),
    ],
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
    "maxItems": [
        group({"type": "array", "items": _INTEGER, "maxItems": 1}, [[], [1]], [[1, 2]]),
        group({"type": "array", "items": _INTEGER, "maxItems": 2.0}, [[], [1, 2]], [[1, 2, 3]]),
    ],
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
    "minProperties and maxProperties": [
        group(
            {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
            [{"a": 1, "b": 1}, {"b": 1, "c": 1, "d": 1}],
            [{}, {"a": 1}],
        ),
        group(
            {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1},
            [{}, {"a": 1}, {"b": 1}, {"c": 1}],
            [{"a": 1, "b": 1}, {"a": 1, "c": 1}],
        ),
        group(
            {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"], "maxProperties": 1},
            [{"a": 1}],
            [{"a": 1, "b": 1}, {"a": 1, "c": 1}],
        ),
    ],
    "oneOf of variants that overlap": [
        group(
            {"type": "object", **_A, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            [{"a": 1}, {"b": 1}],
            [{"a": 1, "b": 1}, {}],
        ),
        group({"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}]}, [2, 6], [3, 5]),
        group(
            {
                "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in ("cat", "dog")],
                "$defs": {
                    kind: {"type": "object", "properties": {"kind": {"const": kind}}, "additionalProperties": False}
                    for kind in ("cat", "dog")
                },
            },
            [{"kind": "cat"}, {"kind": "dog"}],
            [{"kind": "cow"}, {}],
        ),
    ],
    "not": [
        group({"not": {"type": "integer"}}, ["a", None, []], [1]),
        group({"type": "string", "not": {"enum": ["ab", "b"]}}, ["", "a", "abc", "c"], ["ab", "b"]),
        group({"not": {"enum": [1, 3, True, None]}}, [2, 4, -1, 1.5, False, "a"], [1, 3, True, None]),
        group({"type": "object", "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
        group({"type": "integer", "not": {"minimum": 3, "maximum": 5}}, [2, 6], [3, 4, 5]),
        group({"type": "string", "not": {"minLength": 2}}, ["", "a"], ["ab"]),
        group({"type": "string", "not": {"pattern": "^x-"}}, ["x", "ax-", ""], ["x-", "x-a"]),
        group({"type": "array", "not": {"contains": _INTEGER}}, [[], ["a"]], [[1], ["a", 1]]),
    ],
    "if": [
        group(
            {
                "type": "object",
                "properties": {"kind": {"enum": ["a", "b"]}, "n": _INTEGER},
                "required": ["kind"],
                "if": {"properties": {"kind": {"const": "a"}}},
                "then": {"required": ["n"]},
                "else": {"properties": {"n": False}},
            },
            [{"kind": "a", "n": 1}, {"kind": "b"}],
            [{"kind": "a"}, {"kind": "b", "n": 1}],
        )
    ],
    "then": [group({"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 6}}, [1, 5, 6], [7])],
    "else": [group({"type": "integer", "if": {"minimum": 5}, "else": {"maximum": 2}}, [1, 5], [3])],
    "contains": [group({"type": "array", "contains": {"const": 3}}, [[3], [3, 1]], [[], [1]])],
    "minContains": [group({"type": "array", "contains": {"const": 3}, "minContains": 2}, [[3, 3, 1]], [[3], [3, 1]])],
    "maxContains": [
        group({"items": {"enum": [3, 4]}, "contains": {"const": 3}, "maxContains": 1}, [[3], [3, 4]], [[3, 3], [4]])
    ],
    "uniqueItems": [
        group({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, [[], ["b", "a"]], [["a", "a"]]),
        group({"type": "array", "items": _INTEGER, "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
        group({"type": "array", "items": _INTEGER, "uniqueItems": False}, [[1, 1]], [["a"]]),
    ],
    "propertyNames": [
        group({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{}, {"a": 1}], [{"c": 1}]),
        group({"type": "object", **_A, "propertyNames": {"pattern": "^[a-c]$"}}, [{"a": 1}, {"c": 0}], [{"d": 1}]),
        group({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    ],
    "dependentRequired": [
        group(
            {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
            [{}, {"b": 1}, {"a": 1, "b": 1}],
            [{"a": 1}],
        )
    ],
    "dependentSchemas": [
        group(
            {"type": "object", "properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": {"required": ["b"]}}},
            [{}, {"b": 1}, {"a": 1, "b": 1}],
            [{"a": 1}],
        )
    ],
    "dependencies": [
        group(
            {"type": "object", "properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}}, [{"b": 1}], [{"a": 1}]
        )
    ],
    "unevaluatedProperties": [
        group(
            {"allOf": [{"type": "object", **_A}], "properties": {"b": {}}, "unevaluatedProperties": False},
            [{"a": 1, "b": 1}, {}],
            [{"c": 1}],
        )
    ],
    "unevaluatedItems": [group({"prefixItems": [_INTEGER], "unevaluatedItems": False}, [[1], []], [[1, 2]])],
    "$dynamicRef": [group({**_DYNAMIC_TREE}, [{}, {"next": {}}], [{"next": 1}])],
    "$recursiveRef": [
        group({"type": "object", "properties": {"next": {"$recursiveRef": "#"}}}, [{"next": {}}], [{"next": 1}])
    ],
    "nullable": [group({"type": "string", "nullable": True}, ["a", None], [1])],
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
    "format: idn-email": text_format("idn-email", ["a@b.org"], ["a"]),
    "format: idn-hostname": text_format("idn-hostname", ["a-b.org"], ["-a"]),
    "format: uri-reference": text_format(
        "uri-reference", ["/a?b#c", "a/b", "", "https://a.org/"], ["a b", "\\\\a", "[a]"]
    ),
    "format: iri": text_format("iri", ["https://example.org/a"], ["/a", "a b"]),
    "format: iri-reference": text_format("iri-reference", ["/a?b#c", "#"], ["a b", "\\\\a"]),
    "format: uri-template": text_format("uri-template", ["/a/{b}{?c,d*}", ""], ["/a/{b", "{"]),
    "format: json-pointer": text_format("json-pointer", ["", "/a~1b/0"], ["a", "/~", "#/a"]),
    "format: relative-json-pointer": text_format("relative-json-pointer", ["1", "0/a", "0#"], ["/a", "-1/a", "01/a"]),
    "format: regex": text_format("regex", ["^[a-z]+$", r"\d{3}(a|b)?"], ["a(b", "[a", "^*"]),
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
    "x-lark": [
        group({"type": "string", "x-lark": r'start: "\"" /[ab]/+ "\n"?'}, ['"ab', '"a\n'], ['"', '"c', "ab"]),
    ],
    "x-hint": [
        group(
            {"type": "object", "properties": {"a": {"type": "integer", "x-hint": "of all"}}}, [{"a": 1}], [{"a": "x"}]
        )
    ],
}

# Keywords that say nothing about which instances are valid, and a value of each.
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
    "contentEncoding": "base64",
    "contentMediaType": "application/json",
    "contentSchema": {},
    "$vocabulary": {},
    "$recursiveAnchor": True,
    "$dynamicAnchor": "a",
    "id": "https://example.org/a",
    "example": 1,
    "externalDocs": {"url": "https://example.org"},
    "x-guidance": {"lenient": True},
    "any other": 1,
    "format: any other": "int32",
}

# Schemas with `uniqueItems` that are left to the model even where they are strict.
LEFT: dict[str, dict[str, Any]] = {
    "uniqueItems of any items": {"type": "array", "uniqueItems": True},
    "uniqueItems of more than 5 values": {"type": "array", "items": {"enum": [1, 2, 3, 4, 5, 6]}, "uniqueItems": True},
}

# Constraints that cannot be enforced: the keyword that is at fault, and a schema.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "oneOf of variants that cannot be distinguished": (
        "oneOf",
        {"oneOf": [{"type": "string", "format": "date"}, {"type": "string", "pattern": "^[0-9]"}]},
    ),
    "oneOf of a variant within another": ("oneOf", {"oneOf": [_INTEGER, {"type": "number"}]}),
    "not, if: of format, items, additionalProperties, multipleOf, oneOf": (
        "not",
        {"type": "string", "not": {"format": "date"}},
    ),
    "pattern with look-around": ("pattern", {"type": "string", "pattern": "(?=a)b"}),
    "minProperties of members without names": ("minProperties", {"type": "object", "minProperties": 2}),
    "propertyNames of several kinds": ("propertyNames", {"propertyNames": {"pattern": "^a", "maxLength": 3}}),
    "unevaluatedProperties beside anyOf": (
        "unevaluatedProperties",
        {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "unevaluatedProperties": False},
    ),
    "dependentRequired of many members": (
        "dependentRequired",
        {"type": "object", "dependentRequired": {name: ["z"] for name in "abcdefg"}},
    ),
    "$ref out of the schema": ("$ref", {"$ref": "https://example.org/schema"}),
    "$dynamicRef to several places": (
        "$dynamicRef",
        {"$dynamicRef": "#a", "$defs": {"x": {"$dynamicAnchor": "a"}, "y": {"$dynamicAnchor": "a"}}},
    ),
    "const, enum: numbers beyond 2^53, control characters": ("const", {"const": 2**53 + 1}),
    "minimum of 10^18 and more, maximum of -10^18 and less": ("minimum", {"type": "number", "minimum": 1e300}),
}
