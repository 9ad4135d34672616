"""Finds out if no value satisfies two schemas. If that holds for all pairs, `oneOf` is the same as `anyOf`."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any

from tgi_server.grammar.json_schema.document import Document
from tgi_server.grammar.json_schema.keywords import TYPES, Unenforceable, count, is_number, same, type_of

Schema = Any
# Maximum number of comparisons in one document. Real schemas need hundreds.
_MAX_COMPARISONS = 20_000
_MAX_DEPTH = 8
_MAX_PARTS = 64


class Disjointness:
    """Tries to prove that schemas are disjoint. True is a proof; False only means that none was found."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._left = _MAX_COMPARISONS

    def all_disjoint(self, schemas: Sequence[Schema]) -> bool:
        """Returns True if it is certain that no value satisfies two of the schemas."""
        return self.discriminator(schemas, required=True) is not None or all(
            self.disjoint(first, second) for first, second in combinations(schemas, 2)
        )

    def discriminator(self, schemas: Sequence[Schema], *, required: bool) -> str | None:
        """Returns the name of a member whose possible values differ between all the schemas; None if there is none.

        All schemas have to be of objects. required: the member must be required in all but at most one of them.
        """
        parts = [self.parts(schema) for schema in schemas]
        if not all(self._types(each) == {"object"} for each in parts):
            return None
        for name in dict.fromkeys(name for part in parts[0] for name in _members(part)):
            seen: set[Any] = set()
            missing = 0
            for each in parts:
                values = self._member_values(each, name)
                if values is None or not seen.isdisjoint(values):
                    break
                seen |= values
                missing += not _requires(each, name)
            else:
                if missing <= 1 or not required:
                    return name
        return None

    def disjoint(self, first: Schema, second: Schema, depth: int = 0) -> bool:
        """Returns True if it is certain that no value satisfies both schemas."""
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH:
            return False
        if first is False or second is False:
            return True
        one, other = self.parts(first), self.parts(second)
        values, other_values = self.values(one), self.values(other)
        if values is not None and other_values is not None:
            return len(values) * len(other_values) < self._left and not any(
                same(value, other_value) for value in values for other_value in other_values
            )
        common = self._types(one) & self._types(other)
        return all(self._disjoint_as(kind, one, other, depth) for kind in common) or any(
            all(self.disjoint(option, against, depth + 1) for option in options)
            for parts, against in ((one, second), (other, first))
            for options in _options(parts)
        )

    def types(self, schema: Schema) -> set[str]:
        """Returns the types that values of the schema may have. Integers count as `number`."""
        return self._types(self.parts(schema))

    def parts(self, schema: Schema) -> list[dict[str, Any]]:
        """Returns schemas that a value of `schema` has to satisfy: itself, and those in its `$ref` and `allOf`."""
        found: list[dict[str, Any]] = []
        seen: set[int] = set()
        waiting = [schema]
        while waiting and len(seen) < _MAX_PARTS:
            each = waiting.pop()
            if each is False:
                found.append({"enum": []})
            if not isinstance(each, dict) or id(each) in seen or each.get("nullable") is True:
                continue
            seen.add(id(each))
            reference = each.get("$ref")
            if isinstance(reference, str):
                with suppress(Unenforceable):
                    waiting.append(self._document.resolve(each, reference)[0])
                if self._document.draft <= 7:
                    continue  # before draft 2019-09, keywords beside a reference are ignored
            found.append(each)
            if isinstance(each.get("allOf"), list):
                waiting += each["allOf"]
        return found

    def values(self, parts: Sequence[dict[str, Any]]) -> list[Any] | None:
        """Returns the values that `const`, `enum` or the types allow; None if they cannot be listed."""
        for part in parts:
            if "const" in part:
                return [part["const"]]
            if isinstance(part.get("enum"), list):
                return list(part["enum"])
        types = self._declared(parts)
        if types == {"boolean"}:
            return [False, True]
        return [None] if types == {"null"} else None

    def _types(self, parts: Sequence[dict[str, Any]]) -> set[str]:
        values = self.values(parts)
        return self._declared(parts) & (set(TYPES) if values is None else set(map(type_of, values)))

    def _declared(self, parts: Sequence[dict[str, Any]]) -> set[str]:
        types = set(TYPES)
        for part in parts:
            declared = part.get("type")
            if isinstance(declared, str):
                types &= {_number(declared)}
            elif isinstance(declared, list):
                types &= {_number(each) for each in declared if isinstance(each, str)}
        return types

    def _member_values(self, parts: Sequence[dict[str, Any]], name: str) -> set[Any] | None:
        """Returns (type, value) of each value that a member may have; None if they cannot be listed."""
        for schema in _member(parts, name):
            values = self.values(self.parts(schema))
            if values is not None and not any(isinstance(value, list | dict) for value in values):
                return {(type_of(value), value) for value in values}
        return None

    def _disjoint_as(
        self, kind: str, one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], depth: int
    ) -> bool:
        """Returns True if it is certain that no value of this type satisfies both."""
        match kind:
            case "number":
                return _number_range(one, other)
            case "string":
                return _apart(one, other, "minLength", "maxLength") or self._listed(one, other)
            case "array":
                return _apart(one, other, "minItems", "maxItems")
            case "object":
                return _apart(one, other, "minProperties", "maxProperties") or any(
                    self._apart_by_member(name, one, other, depth) for name in required_names([*one, *other])
                )
        return False

    def _listed(self, one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> bool:
        """Returns True if one lists its values, and the other's length bounds exclude all strings among them."""
        for parts, others in ((one, other), (other, one)):
            values = self.values(parts)
            if values is not None and all(
                not isinstance(value, str) or not _has_room(others, value) for value in values
            ):
                return True
        return False

    def _apart_by_member(
        self, name: str, one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], depth: int
    ) -> bool:
        if (_requires(one, name) and _forbids(other, name)) or (_requires(other, name) and _forbids(one, name)):
            return True
        return any(
            self.disjoint(mine, theirs, depth + 1) for mine in _member(one, name) for theirs in _member(other, name)
        )


def _number(name: str) -> str:
    return "number" if name == "integer" else name


def _options(parts: Sequence[dict[str, Any]]) -> Iterator[list[Schema]]:
    for part in parts:
        for keyword in ("anyOf", "oneOf"):
            if isinstance(part.get(keyword), list):
                yield part[keyword]


def _members(part: dict[str, Any]) -> dict[str, Schema]:
    members = part.get("properties")
    return members if isinstance(members, dict) else {}


def _member(parts: Sequence[dict[str, Any]], name: str) -> list[Schema]:
    return [_members(part)[name] for part in parts if name in _members(part)]


def required_names(parts: Sequence[dict[str, Any]]) -> dict[str, None]:
    """Returns the names of required members, in order."""
    listed = (part["required"] for part in parts if isinstance(part.get("required"), list))
    return dict.fromkeys(name for names in listed for name in names if isinstance(name, str))


def _requires(parts: Sequence[dict[str, Any]], name: str) -> bool:
    return name in required_names(parts)


def _forbids(parts: Sequence[dict[str, Any]], name: str) -> bool:
    return any(
        _members(part).get(name) is False
        or (
            part.get("additionalProperties") is False
            and name not in _members(part)
            and not part.get("patternProperties")
        )
        or (isinstance(part.get("not"), dict) and part["not"] == {"required": [name]})
        for part in parts
    )


def _bounds(parts: Sequence[dict[str, Any]], keyword: str) -> list[float]:
    return [part[keyword] for part in parts if is_number(part.get(keyword))]


def _number_range(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> bool:
    for low, high in ((one, other), (other, one)):
        least = max([*_bounds(low, "minimum"), *_bounds(low, "exclusiveMinimum")], default=None)
        most = min([*_bounds(high, "maximum"), *_bounds(high, "exclusiveMaximum")], default=None)
        if least is None or most is None:
            continue
        open_end = least in _bounds(low, "exclusiveMinimum") or most in _bounds(high, "exclusiveMaximum")
        if least > most or (least == most and open_end):
            return True
    return False


def _apart(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], least: str, most: str) -> bool:
    return any(
        max(_bounds(low, least), default=0) > min(_bounds(high, most), default=float("inf"))
        for low, high in ((one, other), (other, one))
    )


def _has_room(parts: Sequence[dict[str, Any]], text: str) -> bool:
    return all(
        (count(part.get("minLength")) or 0) <= len(text) and len(text) <= part.get("maxLength", len(text))
        for part in parts
        if is_number(part.get("maxLength", 0))
    )
