"""Bodies of a route, made of its schema in the API's description: each field in turn is filled with as much as fits."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]

# Texts that are slow to tokenise, to escape, to search, or to show.
_TEXTS = ("rice ", "a", " ", "<|user|>", "🍕", "\\n", "\\u0000", "\U000f0000", "1")
# Strings that a model's template, or the schema's own words, tell apart.
_USUAL = {"role": "user", "type": "function"}
_NESTED = '{"type":"object","properties":{%s},"required":[%s]}'
_PADDING = "x" * 100
# Texts that no route accepts as a body.
WHOLE = ("[", "9", " ", '{"x":', '{"x":"\\n', "\x00")
# Numbers to try, the largest first.
_NUMBERS = (4000, 128, 20, 16, 5, 2, 0.5)


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a body. wrap: returns the smallest body with a value in this place."""

    path: tuple[str, ...]
    schema: Schema
    wrap: Callable[[Any], Any]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def grows(self) -> bool:
        """True for what may have many items."""
        return self.schema.get("type") in ("array", None) or "additionalProperties" in self.schema


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an object in a body.

    path: as the server names it. schemas: those that its value may have. value: the smallest. wrap: returns the
    smallest body in which it has a value.
    """

    path: str
    schemas: Sequence[Schema]
    required: bool
    value: Any
    wrap: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Filling:
    """What a place is filled with. text: returns JSON of about so many bytes."""

    name: str
    text: Callable[[int], str]


class Schemas:
    """The schemas of an OpenAPI document."""

    def __init__(self, document: Schema) -> None:
        self._known: Mapping[str, Schema] = document["components"]["schemas"]
        self.bodies: dict[str, Schema] = {
            path: operations["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path, operations in document["paths"].items()
            if "requestBody" in operations.get("post", {})
        }

    def alternatives(self, schema: Schema) -> list[Schema]:
        """Returns the schemas that a value may have, without null's and without references."""
        if "$ref" in schema:
            return self.alternatives(self._known[schema["$ref"].rpartition("/")[2]])
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema and "properties" not in schema:
                return [found for each in schema[keyword] for found in self.alternatives(each)]
        return [] if schema.get("enum") == [None] else [schema]

    def sample(self, schema: Schema, text: str = "n", name: str = "") -> Any:
        """Returns the smallest value. text: of the strings in it. name: of the member that it is."""
        first = self.alternatives(schema)[0]
        if "enum" in first:
            return first["enum"][0]
        match first.get("type"):
            case "object":
                values = first.get("additionalProperties")
                keys = [f"k{index}" for index in range(first.get("minProperties", 0))]
                return {
                    **{each: self.sample(first["properties"][each], text, each) for each in required(first)},
                    **{key: self.sample(values, text) for key in keys if isinstance(values, dict)},
                }
            case "array":
                several = [text, *(f"{text}{index}" for index in range(1, first.get("minItems", 0)))]
                return [self.sample(first["items"], each) for each in several[: first.get("minItems", 0)]]
            case "string":
                return _USUAL.get(name, text)
            case "integer" | "number":
                number = int(text[1:]) % 1000 + 10 if text[1:].isdigit() else 10
                return number if number <= first.get("maximum", number) else first["maximum"] / 2
            case "boolean":
                return False
        return {}

    def members(
        self, schema: Schema, wrap: Callable[[Any], Any] = lambda value: value, path: str = ""
    ) -> Iterator[Member]:
        """Yields the members of all objects of a body."""
        for each in self.alternatives(schema):
            smallest = self.sample(each)
            for name, member in each.get("properties", {}).items():
                if schemas := self.alternatives(member):
                    own, put = f"{path}.{name}" if path else name, self._member(each, name, wrap)
                    value = smallest[name] if name in smallest else self.sample(member, name=name)
                    yield Member(own, schemas, name in required(each), value, put)
                    yield from self.members(member, put, own)
            if "items" in each:
                rest = smallest[1:]
                yield from self.members(each["items"], lambda value, rest=rest: wrap([value, *rest]), f"{path}[0]")
            if isinstance(values := each.get("additionalProperties"), dict):
                yield from self.members(values, lambda value: wrap({"k": value}), f"{path}.k")

    def places(
        self, schema: Schema, wrap: Callable[[Any], Any] = lambda value: value, path: tuple[str, ...] = ()
    ) -> Iterator[Place]:
        """Yields all places of a body, each with one of its schemas."""
        for each in self.alternatives(schema):
            if path:
                yield Place(path, each, wrap)
            for name, member in each.get("properties", {}).items():
                yield from self.places(member, self._member(each, name, wrap), (*path, name))
            if "items" in each:
                yield from self.places(each["items"], lambda value: wrap([value]), (*path, "[]"))

    def _member(self, schema: Schema, name: str, wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda value: wrap({**self.sample(schema), name: value})

    def fillings(self, schema: Schema) -> Iterator[Filling]:
        """Yields what a place is filled with: what its schema allows, as far as that goes, and what it does not."""
        kind = schema.get("type")
        yield Filling("lists", _listed("[]"))
        if kind in ("string", None):
            for unit in _TEXTS:
                yield Filling(f"text of {unit!r}", _text(unit))
            yield Filling("JSON as text", lambda room: json.dumps(_listed("[]")(room)))
        if kind in ("integer", "number"):
            yield Filling("digits", lambda room: "9" * room)
        if kind == "array":
            for each in self.alternatives(schema["items"]):
                yield Filling("items", self._items(each, schema.get("maxItems", 10**9), ""))
                yield Filling("long items", self._items(each, schema.get("maxItems", 10**9), _PADDING))
                yield Filling("more items", self._items(each, 10**9, ""))
                if each.get("type") in ("integer", None):
                    yield from (Filling(f"the number {digit}", _listed(digit)) for digit in "059")
        if kind is None or "additionalProperties" in schema:
            values = schema.get("additionalProperties", True)
            value = json.dumps(self.sample(values)) if isinstance(values, dict) else "[]"
            member = f'"{{}}":{value.replace("{", "{{").replace("}", "}}")}'
            yield Filling("members", lambda room: f"{{{_joined(member, room)}}}")
        if kind is None:
            yield Filling("depth", lambda room: "[" * (room // 2) + "]" * (room // 2))
            yield Filling("schema", _schema)

    def _items(self, schema: Schema, most: int, padding: str) -> Callable[[int], str]:
        def text(room: int) -> str:
            items: list[str] = []
            left = room
            while left > 0 and len(items) < most:
                items.append(json.dumps(self.sample(schema, f"n{len(items)}{padding}")))
                left -= len(items[-1]) + 1
            return f"[{','.join(items)}]"

        return text


def body(values: Any, settings: Mapping[str, Any], fillings: Sequence[str]) -> str:
    """Returns the body as JSON. settings: members that it has besides. fillings: JSON in the places of marks."""
    text = json.dumps(_merged(settings, values))
    for index, filling in enumerate(fillings):
        text = text.replace(json.dumps(mark(index)), filling)
    return text


def mark(index: int) -> str:
    """Returns what stands in a body for its filling."""
    return f"@{index}@"


def candidates(place: Place) -> Sequence[Any]:
    """Returns values of a number or a switch that have much to do, those with most first."""
    name, kind = place.path[-1], place.schema.get("type")
    if kind == "boolean":
        return () if name in ("stream", "strict", "schema") else (True,)
    if kind not in ("integer", "number") or name in ("seed", "min_tokens"):
        return ()
    if limits_answer(place):
        return (2,)
    return () if "[]" in place.path else _NUMBERS


def limits_answer(place: Place) -> bool:
    """Returns True if the place has the length of the answer."""
    return place.path[-1].startswith("max_") and place.path[-1].endswith("tokens")


def required(schema: Schema) -> list[str]:
    """Returns the members that an object needs; of those of which it needs one, the first."""
    return [*schema.get("required", ()), *schema.get("anyOf", [{}])[0].get("required", ())]


def merged(places: Sequence[Place], values: Sequence[Any]) -> Any:
    """Returns the smallest body with values in several places."""
    whole: Any = {}
    for place, value in zip(places, values, strict=True):
        whole = _merged(whole, place.wrap(value))
    return whole


def _merged(first: Any, second: Any) -> Any:
    """Returns both, with the second's where they differ: members of objects, and the first items of lists."""
    if isinstance(first, dict) and isinstance(second, dict):
        return {**first, **{name: _merged(first.get(name), value) for name, value in second.items()}}
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second) == 1:
        return [_merged(first[0], second[0])]
    if isinstance(first, str) and first.startswith("@") and not (isinstance(second, str) and second.startswith("@")):
        return first
    return second


def _listed(item: str) -> Callable[[int], str]:
    return lambda room: f"[{','.join([item] * (room // (len(item) + 1)))}]"


def _text(unit: str) -> Callable[[int], str]:
    return lambda room: f'"{unit * (room // len(unit.encode()))}"'


def _joined(item: str, room: int) -> str:
    """Returns numbered items, with commas."""
    return ",".join(item.format(index) for index in range(room // (len(item) + 4)))


def _schema(room: int) -> str:
    return _NESTED % (_joined('"n{}":{{"type":"string"}}', room * 3 // 4), _joined('"n{}"', room // 4))
