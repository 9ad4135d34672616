"""Translates a JSON schema to the keywords that llguidance enforces, and lists what is left to the model."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import nextafter
from typing import Any

from llguidance import LLMatcher

from tgi_server.grammar.errors import InvalidGrammar, reason
from tgi_server.grammar.json_schema.disjointness import Disjointness
from tgi_server.grammar.json_schema.document import Document
from tgi_server.grammar.json_schema.keywords import (
    HINT,
    LARGEST_EXACT,
    LARK,
    MAX_DEPTH,
    SPAN,
    SPAN_SOURCE,
    Unenforceable,
    check_value,
    is_number,
)
from tgi_server.grammar.json_schema.negation import Negation
from tgi_server.grammar.json_schema.rewriting import REWRITTEN, Part

Schema = Any

# The highest level of leniency, see `enforced_schema`.
MOST_LENIENT = 2
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_]")
# If a lenient schema cannot be compiled with these keywords, it is compiled without them: it is still of use.
_COSTLY = frozenset(
    {
        *("pattern", "patternProperties", "multipleOf", "minLength", "maxLength", "minItems", "maxItems", "format"),
        *REWRITTEN,
    }
    - {"oneOf"}
)


@dataclass(frozen=True, slots=True)
class EnforcedSchema:
    """A translated JSON schema.

    definition: the schema, in keywords that llguidance enforces. annotated: True if it has a span, a hint or a Lark
    grammar. places: references in `definition`, by the JSON pointers of their targets in the original schema.
    left: the constraints that are left to the model, each as a line with the keyword and its schema's JSON pointer.
    """

    definition: dict[str, Any]
    annotated: bool
    places: Mapping[str, str]
    left: tuple[str, ...]


def enforced_schema(text: str, lenient: Mapping[str, int]) -> EnforcedSchema:
    """Translates a JSON schema to the keywords that llguidance enforces.

    text: the schema. lenient: levels of leniency by place, a JSON pointer that begins with #. Below such a place,
    constraints that cannot be enforced are left to the model, and at level 1 also keywords that often make a schema too
    complex; at level 2, all but the type of an object. Elsewhere, constraints that cannot be enforced are errors.

    Raises InvalidGrammar, which names the keyword and its place.
    """
    document = Document(text)
    translation = _Translation(document, lenient)
    root = translation.schema(document.root, "#")
    if root is False:
        raise InvalidGrammar("nothing matches the JSON schema `false`")
    definition: dict[str, Any] = {} if root is True else root
    if definitions := translation.definitions():
        definition = {**definition, "$defs": definitions}
    return EnforcedSchema(definition, document.annotated, translation.places, tuple(translation.left))


class _Translation:
    """The state of one document's translation. places, left: as in `EnforcedSchema`."""

    def __init__(self, document: Document, lenient: Mapping[str, int]) -> None:
        self.document = document
        self.negation = Negation(document)
        self.disjointness = Disjointness(document)
        self.places: dict[str, str] = {}
        self.left: list[str] = []
        self._lenient = lenient
        self._names: dict[int, str] = {}
        self._taken: set[str] = set()
        self._waiting: list[tuple[str, Schema, str]] = []
        self._usable: dict[str, str | None] = {}

    def schema(self, source: Schema, place: str, depth: int = 0) -> Schema:
        """Translates a schema. place: its JSON pointer. Raises InvalidGrammar."""
        if isinstance(source, bool):
            return source
        if not isinstance(source, dict):
            raise InvalidGrammar(f"the JSON schema at {place} must be an object")
        if depth > MAX_DEPTH:
            raise InvalidGrammar(f"the JSON schema is nested more than {MAX_DEPTH} levels deep")
        if self._lenient.get(place, 0) > 1:
            self._note(f"all at {place}")
            return {"type": "object"} if self.disjointness.types(source) == {"object"} else {}
        own: dict[str, Any] = {}
        beside: list[Schema] = []
        for keyword, value in source.items():
            try:
                self._translate(Part(self, source, keyword, value, place, depth), own, beside)
            except Unenforceable as fault:
                if self._level(place) < 0 and not fault.optional:
                    raise InvalidGrammar(f"the JSON schema keyword {keyword!r} (at {place}) {fault}") from fault
                self._note(f"{keyword} at {place}")
                if fault.weaker is not True:
                    beside.append(fault.weaker)
        parts = [*([own] if own else []), *beside]
        whole = {"allOf": parts} if len(parts) > 1 else parts[0] if parts else {}
        if source.get("nullable") is True and whole:
            whole = {"anyOf": [whole, {"type": "null"}]}
        # A hint belongs to the whole schema, not to one of the parts.
        return {**whole, HINT: source[HINT]} if HINT in source else whole

    def definitions(self) -> dict[str, Schema]:
        """Returns the translated targets of all references, by the names that the references have for them."""
        definitions: dict[str, Schema] = {}
        while self._waiting:
            name, schema, place = self._waiting.pop()
            definitions[name] = self.schema(schema, place)
        return definitions

    def reference(self, target: Schema, place: str) -> str:
        """Returns a reference to the translation of `target`."""
        name = self._names.get(id(target))
        if name is None:
            called = _NOT_IN_NAMES.sub("_", place.rpartition("/")[2])
            name = called if called not in self._taken else f"{called}-{len(self._names)}"
            self._names[id(target)] = name
            self._taken.add(name)
            self._waiting.append((name, target, place))
        self.places[place] = f"#/$defs/{name}"
        return self.places[place]

    def check_pattern(self, pattern: str) -> None:
        """Raises Unenforceable if llguidance cannot compile the regular expression."""
        if pattern not in self._usable:
            grammar = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
            self._usable[pattern] = LLMatcher.validate_grammar(grammar) or None
        if (fault := self._usable[pattern]) is not None:
            raise Unenforceable(f"cannot be followed: {reason(fault)}")

    def _translate(self, part: Part, own: dict[str, Any], beside: list[Schema]) -> None:
        keyword = part.keyword
        if keyword in (SPAN, SPAN_SOURCE, LARK):
            own[keyword] = part.value
        if keyword not in _OWN and keyword not in REWRITTEN:
            return
        check_value(keyword, part.value)
        if keyword in _COSTLY and self._level(part.place) > 0:
            raise Unenforceable("makes the schema too complex")
        if keyword in _OWN:
            own.update(_OWN[keyword](self, part))
        elif (said := REWRITTEN[keyword](part)) is not True:
            beside.append(said)

    def _note(self, line: str) -> None:
        if line not in self.left:
            self.left.append(line)

    def _level(self, place: str) -> int:
        """Returns the level of leniency at a place; -1 if nothing may be left to the model."""
        return max(
            (level for lenient, level in self._lenient.items() if place == lenient or place.startswith(f"{lenient}/")),
            default=-1,
        )


def _as_it_is(scope: _Translation, part: Part) -> dict[str, Any]:
    return {part.keyword: part.value}


def _amount(scope: _Translation, part: Part) -> dict[str, Any]:
    return {part.keyword: int(part.value)}


# llguidance supports no bounds further from 0 than the largest float that is a 64-bit integer, and none that exclude
# all numbers of less than 19 digits.
_WIDEST_BOUND = 2**63 - 2**10
_NARROWEST_BOUND = 10**18 - 2**10  # beyond it, llguidance reads floats as 10^18


def _bound(scope: _Translation, part: Part) -> dict[str, Any]:
    """Translates a bound of numbers. llguidance compares floats, so it is rounded towards what the bound allows.

    In draft 4, `exclusiveMinimum: true` makes `minimum` exclusive. A bound too far from 0 is moved closer, if that only
    allows less. Raises Unenforceable if it cannot be.
    """
    value = part.value
    if isinstance(value, bool):
        inclusive = part.source.get(_INCLUSIVE[part.keyword])
        if not value or not is_number(inclusive):
            return {}
        value = inclusive
    lower = part.keyword.endswith("inimum")
    if value <= -_WIDEST_BOUND if lower else value >= _WIDEST_BOUND:
        return {part.keyword: -_WIDEST_BOUND if lower else _WIDEST_BOUND}
    if not (value <= _NARROWEST_BOUND if lower else value >= -_NARROWEST_BOUND):
        raise Unenforceable("is too large")
    bound = float(value)
    if bound != value:
        while (bound < value) if lower else (bound > value):
            bound = nextafter(bound, float("inf") if lower else float("-inf"))
    return {part.keyword: value if bound == value else bound}


# Control characters without a short escape in JSON, and surrogates.
_UNWRITTEN = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")
_INCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}


def _values(scope: _Translation, part: Part) -> dict[str, Any]:
    values = [part.value] if part.keyword == "const" else part.value
    for value in values:
        _check_exact(value)
    return {part.keyword: part.value}


def _check_exact(value: Any) -> None:
    """Raises Unenforceable if llguidance would write another value instead."""
    if isinstance(value, list):
        for each in value:
            _check_exact(each)
    elif isinstance(value, dict):
        for each in value.values():
            _check_exact(each)
    elif isinstance(value, str) and _UNWRITTEN.search(value):
        raise Unenforceable(f"has a character that is not written: {value[:40]!r}")
    elif is_number(value) and not -LARGEST_EXACT <= value <= LARGEST_EXACT:
        raise Unenforceable(f"has a number that is too large: {value}")


def _pattern(scope: _Translation, part: Part) -> dict[str, Any]:
    scope.check_pattern(part.value)
    return {"pattern": part.value}


def _reference(scope: _Translation, part: Part) -> dict[str, Any]:
    document = scope.document
    resolve = document.resolve if part.keyword == "$ref" else document.resolve_dynamic
    return {"$ref": scope.reference(*resolve(part.source, part.value))}


def _choices(scope: _Translation, part: Part) -> dict[str, Any]:
    return {part.keyword: [part.translated(each, str(index)) for index, each in enumerate(part.value)]}


def _items(scope: _Translation, part: Part) -> dict[str, Any]:
    """Translates `items`. A list is what `prefixItems` is since draft 2020-12."""
    if isinstance(part.value, list):
        return {"prefixItems": [part.translated(each, str(index)) for index, each in enumerate(part.value)]}
    return {"items": part.translated(part.value)}


def _additional_items(scope: _Translation, part: Part) -> dict[str, Any]:
    return {"items": part.translated(part.value)} if isinstance(part.source.get("items"), list) else {}


def _members(scope: _Translation, part: Part) -> dict[str, Any]:
    return {part.keyword: {name: part.translated(each, name) for name, each in part.value.items()}}


def _patterned_members(scope: _Translation, part: Part) -> dict[str, Any]:
    for pattern in part.value:
        scope.check_pattern(pattern)
    return _members(scope, part)


def _additional_members(scope: _Translation, part: Part) -> dict[str, Any]:
    return {part.keyword: part.translated(part.value)}


_OWN: dict[str, Callable[[_Translation, Part], dict[str, Any]]] = {
    **dict.fromkeys(("type", "multipleOf", "required"), _as_it_is),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _amount),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _bound),
    **dict.fromkeys(("enum", "const"), _values),
    "pattern": _pattern,
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), _reference),
    **dict.fromkeys(("allOf", "anyOf", "prefixItems"), _choices),
    "items": _items,
    "additionalItems": _additional_items,
    "properties": _members,
    "patternProperties": _patterned_members,
    "additionalProperties": _additional_members,
}

# The keywords that are enforced, or refused by name.
KEYWORDS = frozenset({*_OWN, *REWRITTEN, "nullable", SPAN, SPAN_SOURCE, HINT, LARK})
