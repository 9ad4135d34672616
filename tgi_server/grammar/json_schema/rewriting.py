"""Rewrites keywords that llguidance does not know as schemas of keywords that it knows.

A value has to satisfy both: the schema without the keyword, and the schema that replaces the keyword.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from math import comb, perm
from typing import Any, Protocol

from tgi_server.grammar.json_schema.disjointness import Disjointness, required_names
from tgi_server.grammar.json_schema.document import Document
from tgi_server.grammar.json_schema.formats import FORMATS
from tgi_server.grammar.json_schema.keywords import TYPES, Unenforceable, count, escaped, same
from tgi_server.grammar.json_schema.negation import Negation

Schema = Any

# Maximum number of alternatives for one keyword. Each multiplies the schema that the keyword is from.
_MAX_WAYS = 32
_MAX_ARRANGEMENTS = 400
_MAX_DEPENDENTS = 6
_MAX_CONTAINED = 64


class Scope(Protocol):
    """The translation of a whole document, as the rewriting of a keyword sees it."""

    document: Document
    negation: Negation
    disjointness: Disjointness

    def schema(self, source: Schema, place: str, depth: int = 0) -> Schema:
        """Translates a schema. place: its JSON pointer. Raises InvalidGrammar."""


@dataclass(frozen=True, slots=True)
class Part:
    """One keyword and its value. source: the schema with the keyword. place: the JSON pointer of that schema."""

    scope: Scope
    source: dict[str, Any]
    keyword: str
    value: Any
    place: str
    depth: int

    def translated(self, schema: Schema, *names: str) -> Schema:
        """Translates a schema inside the keyword's value. names: the path from the keyword to it."""
        return self.scope.schema(schema, "/".join((self.place, self.keyword, *map(escaped, names))), self.depth + 1)

    def opposite(self, schema: Schema) -> Schema:
        """Returns the translated negation of a schema. Raises Unenforceable."""
        return self.translated(self.scope.negation.opposite(schema))

    def count(self, keyword: str, default: int) -> int:
        """Returns the value of another keyword of the same schema, which is a count."""
        number = count(self.source.get(keyword))
        return default if number is None else number

    def only(self, kind: str, ways: Sequence[Schema]) -> Schema:
        """Returns a schema: values of type `kind` have to satisfy one of `ways`; other types are not restricted."""
        others = [name for name in TYPES if name != kind and name in self._types()]
        options = [*({"type": kind, **way} for way in ways), *([{"type": others}] if others else [])]
        return {"anyOf": options} if options else False

    def _types(self) -> set[str]:
        return self.scope.disjointness.types(self.source)


def _one_of(part: Part) -> Schema:
    """Rewrites `oneOf` as `anyOf` of disjoint variants."""
    variants: list[Schema] = part.value
    translated = [part.translated(each, str(index)) for index, each in enumerate(variants)]
    logic = part.scope.disjointness
    if len(variants) == 1 or logic.all_disjoint(variants):
        return {"anyOf": translated}
    if (name := logic.discriminator(variants, required=False)) is not None:
        present = {"type": "object", "required": [name]}
        return {"anyOf": [{"allOf": [each, present]} for each in translated]}
    any_of = {"anyOf": translated}
    if len(variants) > _MAX_WAYS:
        raise Unenforceable("has variants that cannot be distinguished", any_of)
    try:
        ways = [_apart_from_others(part, translated, index) for index in range(len(variants))]
    except Unenforceable as reason:
        raise Unenforceable(f"has variants that cannot be distinguished: one of them {reason}", any_of) from reason
    return {"anyOf": ways}


def _apart_from_others(part: Part, translated: Sequence[Schema], index: int) -> Schema:
    """Returns a variant without the values that another variant allows as well."""
    logic, variant = part.scope.disjointness, part.value[index]
    others = [each for i, each in enumerate(part.value) if i != index and not logic.disjoint(variant, each)]
    opposites = [part.opposite(each) for each in others]
    types = logic.types(variant)
    for each in opposites:
        types &= logic.types(each)
    if not types:
        raise Unenforceable("allows nothing that another one does not allow")
    return {"allOf": [translated[index], *opposites]}


def _not(part: Part) -> Schema:
    return part.opposite(part.value)


def _if(part: Part) -> Schema:
    condition = part.value
    if "then" not in part.source and "else" not in part.source:
        return True
    scope, depth = part.scope, part.depth + 1
    met = [part.translated(condition), scope.schema(part.source.get("then", True), f"{part.place}/then", depth)]
    unmet = [part.opposite(condition), scope.schema(part.source.get("else", True), f"{part.place}/else", depth)]
    return {"anyOf": [{"allOf": each} for each in (met, unmet)]}


def _dependencies(part: Part) -> Schema:
    """Rewrites a map from a member's name to further required names, or to a schema that then has to hold."""
    always = required_names([part.source])
    said: list[Schema] = []
    for name, wanted in part.value.items():
        if isinstance(wanted, str):
            wanted = [wanted]  # as draft 3 had it
        if isinstance(wanted, list):
            met: Schema = {"required": [name, *wanted]}
        else:
            met = {"allOf": [part.translated(wanted, name), {"required": [name]}]}
        unmet = [] if name in always else [{"properties": {name: False}}]
        if wanted not in ([], True, {}):
            said.append(part.only("object", [*unmet, met]))
    if len(said) > _MAX_DEPENDENTS:
        raise Unenforceable(f"has {len(said)} members; at most {_MAX_DEPENDENTS} can be enforced together")
    return {"allOf": said} if said else True


def _contains(part: Part) -> Schema:
    """Rewrites `contains`: the items that must match come first, after the items of `prefixItems`."""
    least, most = part.count("minContains", 1), part.count("maxContains", -1)
    places = part.source.get("prefixItems", part.source.get("items"))
    ahead = len(places) if isinstance(places, list) else 0
    if least > _MAX_CONTAINED or most > _MAX_CONTAINED:
        raise Unenforceable(f"requires more than {_MAX_CONTAINED} items")
    if most >= 0 and ahead:
        raise Unenforceable("cannot count items beside `prefixItems` or a list of `items`")
    if 0 <= most < least:
        return part.only("array", [])
    wanted: dict[str, Any] = {"prefixItems": [True] * ahead + [part.translated(part.value)] * least}
    if least:
        wanted["minItems"] = ahead + least
    if most >= 0:
        wanted["prefixItems"] += [True] * (most - least)
        wanted["items"] = part.opposite(part.value)
    return part.only("array", [wanted]) if least or most >= 0 else True


def _unique_items(part: Part) -> Schema:
    """Lists all arrays, if the items have few possible values.

    Otherwise it is left to the model: pydantic writes the keyword for `set[str]`, and then drops repeated items.
    """
    logic, items = part.scope.disjointness, part.source.get("items")
    if not part.value or part.count("maxItems", 2) <= 1 or "array" not in logic.types(part.source):
        return True
    values = None if isinstance(items, list) or "prefixItems" in part.source else logic.values(logic.parts(items))
    if values is None:
        raise Unenforceable("cannot be enforced for items that may be anything", optional=True)
    different: list[Any] = []
    for value in values:
        if not any(same(value, each) for each in different):
            different.append(value)
    least, most = part.count("minItems", 0), min(part.count("maxItems", len(different)), len(different))
    if sum(perm(len(different), length) for length in range(least, most + 1)) > _MAX_ARRANGEMENTS:
        raise Unenforceable(f"cannot be enforced for {len(different)} different items", optional=True)
    arrays = [array for length in range(least, most + 1) for array in permutations(different, length)]
    return part.only(
        "array",
        [
            {"prefixItems": [{"const": each} for each in array], "minItems": len(array), "maxItems": len(array)}
            for array in arrays
        ],
    )


def _property_names(part: Part) -> Schema:
    logic, names = part.scope.disjointness, part.value
    if names is True or names == {}:
        return True
    if "string" not in logic.types(names):
        return part.only("object", [{"additionalProperties": False}])
    parts = logic.parts(names)
    values = logic.values(parts)
    keywords = {keyword for each in parts for keyword in each if keyword in _OF_NAMES}
    if values is not None and keywords <= {"enum", "const"}:
        allowed = {value: True for value in values if isinstance(value, str)}
        return part.only("object", [{"properties": allowed, "additionalProperties": False}])
    if not keywords:
        return True
    patterns = [pattern for each in parts for pattern in _patterns_of_names(each)]
    if len(patterns) != 1 or any(keyword not in _SAID_OF_NAMES for keyword in keywords):
        raise Unenforceable("can be a list of names, or one pattern")
    return part.only("object", [{"patternProperties": {patterns[0]: True}, "additionalProperties": False}])


_SAID_OF_NAMES = ("pattern", "minLength", "maxLength", "format")
_OF_NAMES = (*_SAID_OF_NAMES, "enum", "const", "anyOf", "oneOf", "not", "if", "$dynamicRef", "$recursiveRef")


def _patterns_of_names(names: dict[str, Any]) -> list[str]:
    found = [names["pattern"]] if isinstance(names.get("pattern"), str) else []
    least, most = count(names.get("minLength")), count(names.get("maxLength"))
    if least is not None or most is not None:
        found.append(rf"^[\s\S]{{{least or 0},{'' if most is None else most}}}$")
    enforced = FORMATS.get(str(names.get("format")), {})
    if "pattern" in enforced and len(enforced) == 1:
        found.append(enforced["pattern"])
    elif enforced:
        raise Unenforceable(f"cannot be of the format {names['format']!r}")
    return found


def _format(part: Part) -> Schema:
    """Rewrites a format that JSON Schema defines. Others are annotations and ignored."""
    return FORMATS.get(part.value, True) if isinstance(part.value, str) else True


def _min_properties(part: Part) -> Schema:
    """Requires enough of the named members, or at most one that is not named: two of these could have the same name."""
    wanted = part.count("minProperties", 0)
    required, optional, closed = _members(part)
    missing = wanted - len(required)
    if missing <= 0:
        return True
    if not optional and (missing == 1 or closed):
        return part.only("object", [{"minProperties": wanted}])
    if missing > len(optional) or comb(len(optional), missing) > _MAX_WAYS:
        raise Unenforceable(f"cannot be {wanted} here: names of members that are not in `properties` may come twice")
    ways: list[Schema] = [{"required": list(names)} for names in combinations(optional, missing)]
    if not closed and missing == 1:
        ways.append({"properties": dict.fromkeys(optional, False), "minProperties": wanted})
    return part.only("object", ways)


def _max_properties(part: Part) -> Schema:
    wanted = part.count("maxProperties", 0)
    required, optional, closed = _members(part)
    room = wanted - len(required)
    if closed and len(optional) <= room:
        return True
    if not optional or room <= 0:
        return part.only("object", [{"properties": dict.fromkeys(optional, False), "maxProperties": wanted}])
    if comb(len(optional), room) > _MAX_WAYS:
        raise Unenforceable(f"cannot be {wanted} here: there are too many ways to choose the members")
    known = dict.fromkeys((*required, *optional), True)
    ways: list[Schema] = [
        {
            "properties": {name: name in names or name in required for name in known},
            "additionalProperties": False,
        }
        for names in combinations(optional, min(room, len(optional)))
    ]
    if not closed:
        ways.append({"properties": dict.fromkeys(optional, False), "maxProperties": wanted})
    return part.only("object", ways)


def _members(part: Part) -> tuple[list[str], list[str], bool]:
    """Returns the names of the required members, those of the optional members, and True if no others are allowed."""
    source = part.source
    properties = source.get("properties")
    named = [name for name, each in properties.items() if each is not False] if isinstance(properties, dict) else []
    required = list(required_names([source]))
    closed = source.get("additionalProperties") is False and not source.get("patternProperties")
    return required, [name for name in named if name not in required], closed


def _unevaluated_properties(part: Part) -> Schema:
    """Rewrites it as `additionalProperties`, if all named members are in the schema, its `$ref` and its `allOf`."""
    if part.value is True or part.value == {}:
        return True
    parts = _evaluated(part)
    if any(
        "additionalProperties" in each or "unevaluatedProperties" in each for each in parts if each is not part.source
    ):
        raise Unenforceable("cannot be enforced beside another keyword for the members that are not named")
    said: dict[str, Any] = {"additionalProperties": part.translated(part.value)}
    for keyword in ("properties", "patternProperties"):
        known = {name: True for each in parts if isinstance(each.get(keyword), dict) for name in each[keyword]}
        if known:
            said[keyword] = known
    return part.only("object", [said]) if "additionalProperties" not in part.source else True


def _unevaluated_items(part: Part) -> Schema:
    if part.value is True or part.value == {}:
        return True
    parts = _evaluated(part)
    if len(parts) > 1 or isinstance(part.source.get("items"), list) or "contains" in part.source:
        raise Unenforceable("can be enforced beside `prefixItems` only")
    if "items" in part.source:
        return True
    places = part.source.get("prefixItems")
    ahead = [True] * len(places) if isinstance(places, list) else []
    return part.only("array", [{"prefixItems": ahead, "items": part.translated(part.value)}])


def _evaluated(part: Part) -> list[dict[str, Any]]:
    """Returns the schemas that always apply with this one. Raises Unenforceable if others apply to some values only."""
    parts = part.scope.disjointness.parts(part.source)
    for each in parts:
        for keyword in ("anyOf", "oneOf", "if", "dependentSchemas", "dependencies", "not", "$dynamicRef", "nullable"):
            if keyword in each:
                raise Unenforceable(f"cannot be enforced beside {keyword!r}")
        if "$ref" in each and each is not part.source and each.get("unevaluatedProperties") is not None:
            raise Unenforceable("cannot be enforced beside another one")
    return parts


REWRITTEN: dict[str, Callable[[Part], Schema]] = {
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), _dependencies),
    "contains": _contains,
    "uniqueItems": _unique_items,
    "format": _format,
    "propertyNames": _property_names,
    "minProperties": _min_properties,
    "maxProperties": _max_properties,
    "unevaluatedProperties": _unevaluated_properties,
    "unevaluatedItems": _unevaluated_items,
}
