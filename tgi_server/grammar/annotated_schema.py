"""Writes JSON schemas with the project's own keywords `x-span`, `x-lark` and `x-hint` as Lark grammars.

The objects and arrays that contain an annotated schema become rules; all other schemas are left to llguidance
(`%json`). `x-span`: the value is a substring of a source text, which becomes a terminal. `x-lark`: the value matches a
Lark grammar. `x-hint`: the engine shows the model some words before the value; the generated text does not have them.
The grammar has a marker there, a token id that the engine replaces by the tokens of the words.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tgi_server.grammar.errors import InvalidGrammar
from tgi_server.grammar.json_lark import json_lark
from tgi_server.grammar.json_schema.keywords import (
    ANNOTATIONS,
    HINT,
    ITEM_SEPARATOR,
    JSON_LAYOUT,
    KEY_SEPARATOR,
    LARK,
    SPAN,
    SPAN_SOURCE,
    subschemas,
)

# All references in a translated schema lead here.
_DEFINITIONS = "#/$defs/"
_BESIDE_SPAN = {"type", SPAN, SPAN_SOURCE}
_OBJECT = {"type", "properties", "required", "additionalProperties"}
_ARRAY = {"type", "items", "minItems", "maxItems"}
_WORDS = "words"
_CHARACTERS = "characters"
_PIECES = {_WORDS: re.compile(r"\w+|\s+|[^\w\s]"), _CHARACTERS: re.compile(r".", re.DOTALL)}
# Words: the first piece and the last are words, and not the letter of an escape such as \n.
_BOUNDS = {_WORDS: r"\w(\w|(?s:.)*[^\\]\w)?", _CHARACTERS: "(?s:.)+"}
_MAX_ITEMS = 1_000
_SCHEMA_IN_FRAME = re.compile(r'%schema ("(?:[^"\\]|\\.)*")')


def annotated_lark(
    schema: dict[str, Any],
    text: str,
    markers: Sequence[int],
    frame: str = "",
    places: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, dict[int, str]]:
    """Returns the Lark grammar, and the words of each hint by its marker.

    schema: the definition of an `EnforcedSchema`. text: the source of spans whose schema names none. markers: token ids
    that may be used as markers. frame: a Lark grammar around parts of the schema; empty: the schema is the grammar.
    places: references in the schema, by the JSON pointers that the frame has for them.
    Raises InvalidGrammar if keywords cannot be combined.
    """
    writer = _Writer(schema.get("$defs", {}), text, markers)
    if frame:
        start = _SCHEMA_IN_FRAME.sub(lambda named: writer.reference(places[json.loads(named[1])]), frame)
    else:
        root = {keyword: value for keyword, value in schema.items() if keyword != "$defs"}
        start = f"%llguidance {{}}\nstart: {writer.rule(root, '#')}"
    return "\n".join([start, *writer.lines]), writer.hints


class _Writer:
    def __init__(self, definitions: Mapping[str, Any], text: str, markers: Sequence[int]) -> None:
        self.lines: list[str] = []
        self.hints: dict[int, str] = {}
        self._text = text
        self._markers = markers
        self._definitions = {_DEFINITIONS + name: each for name, each in definitions.items()}
        self._annotated = self._annotated_references()
        self._rules: dict[str, str] = {}  # by reference
        self._sources: dict[tuple[str, str], str] = {}
        self._texts: dict[str, str] = {}  # by Lark grammar
        self._number = 0

    def rule(self, schema: Any, place: str) -> str:
        """Writes a rule for the schema; returns its name."""
        if isinstance(schema, dict) and HINT in schema:
            raise InvalidGrammar(f"{HINT} belongs to a property, not where it is in {place}")
        if not self._leads_to_annotation(schema):
            return self._add(f"%json {json.dumps(self._alone(schema))}")
        if SPAN in schema:
            return self._span(schema, place)
        if LARK in schema:
            return self._text_of(schema, place)
        if "$ref" in schema:
            self._only(schema, {"$ref"}, place)
            return self.reference(schema["$ref"])
        if "anyOf" in schema:
            self._only(schema, {"anyOf"}, place)
            names = [self.rule(each, f"{place}/anyOf/{i}") for i, each in enumerate(schema["anyOf"])]
            return self._add(" | ".join(names))
        if "properties" in schema:
            return self._object(schema, place)
        if "items" in schema:
            return self._array(schema, place)
        raise InvalidGrammar(
            f"{SPAN}, {LARK} and {HINT} are supported below properties, items, anyOf and $ref, "
            f"not where they are in {place}"
        )

    def reference(self, reference: str) -> str:
        """Writes a rule for the schema that a reference names, once; returns its name."""
        if reference not in self._rules:
            name = self._rules[reference] = f"ref{len(self._rules)}"
            self.lines.append(f"{name}: {self.rule(self._definitions[reference], reference)}")
        return self._rules[reference]

    def _add(self, body: str) -> str:
        self._number += 1
        name = f"rule{self._number}"
        self.lines.append(f"{name}: {body}")
        return name

    def _only(self, schema: dict[str, Any], known: set[str], place: str) -> None:
        others = sorted(set(schema) - known)
        if others:
            raise InvalidGrammar(
                f"the JSON schema keyword {others[0]!r} (at {place}) cannot be combined with {SPAN}, {LARK} or {HINT} "
                "in the same part of the schema"
            )

    def _alone(self, schema: Any) -> Any:
        """Returns the schema as a document of its own, with the definitions that it refers to."""
        if not isinstance(schema, dict):
            return {"allOf": [schema]} if schema is False else {}
        needed: dict[str, Any] = {}
        waiting = sorted(_references(schema))
        while waiting:
            reference = waiting.pop()
            if reference not in needed:
                needed[reference] = self._definitions[reference]
                waiting += sorted(_references(needed[reference]))
        definitions = {reference.removeprefix(_DEFINITIONS): each for reference, each in needed.items()}
        return {**schema, **({"$defs": definitions} if definitions else {}), "x-guidance": JSON_LAYOUT}

    def _leads_to_annotation(self, schema: Any) -> bool:
        """Returns True if the schema, or a schema that it refers to, has an annotation."""
        return _is_annotated(schema) or not self._annotated.isdisjoint(_references(schema))

    def _annotated_references(self) -> set[str]:
        """Returns the references to schemas that have an annotation, themselves or through further references."""
        naming: dict[str, list[str]] = defaultdict(list)
        for reference, schema in self._definitions.items():
            for named in _references(schema):
                naming[named].append(reference)
        found: set[str] = set()
        waiting = [reference for reference, schema in self._definitions.items() if _is_annotated(schema)]
        while waiting:
            reference = waiting.pop()
            if reference not in found:
                found.add(reference)
                waiting += naming[reference]
        return found

    def _object(self, schema: dict[str, Any], place: str) -> str:
        """Writes a rule for an object. Properties come in the order of the schema; others are never written."""
        self._only(schema, _OBJECT, place)
        if schema.get("type", "object") != "object":
            raise InvalidGrammar(f"a schema with properties (at {place}) must be of type object")
        properties, required = schema["properties"], schema.get("required", [])
        missing = [name for name in required if name not in properties]
        if missing:
            raise InvalidGrammar(f"the required property {missing[0]!r} (at {place}) is not among the properties")
        members = [(self._member(key, value, place), key in required) for key, value in properties.items()]
        # From the last member to the first. after: what may follow another member; first: what may follow the brace.
        after = first = '""'
        for member, needed in reversed(members):
            more = self._add(f'"{ITEM_SEPARATOR}" {member} {after}')
            begun = self._add(f"{member} {after}")
            first = begun if needed else self._add(f"{begun} | {first}")
            after = more if needed else self._add(f"{more} | {after}")
        return self._add(f'"{{" {first} "}}"')

    def _member(self, key: str, value: Any, place: str) -> str:
        marker = ""
        if isinstance(value, dict) and HINT in value:
            marker = f" {self._marker(value[HINT], place)}"
            value = {keyword: each for keyword, each in value.items() if keyword != HINT}
        name = self.rule(value, f"{place}/properties/{key}")
        return self._add(f"{_quoted(json.dumps(key, ensure_ascii=False) + KEY_SEPARATOR)}{marker} {name}")

    def _marker(self, hint: Any, place: str) -> str:
        if not isinstance(hint, str) or not hint.strip():
            raise InvalidGrammar(f"{HINT} (in {place}) must be a text")
        token = next((token for token, known in self.hints.items() if known == hint), None)
        if token is None:
            if len(self.hints) == len(self._markers):
                raise InvalidGrammar(f"a schema may have at most {len(self._markers)} different hints")
            token = self._markers[len(self.hints)]
            self.hints[token] = hint
        return f"<[{token}]>"

    def _array(self, schema: dict[str, Any], place: str) -> str:
        self._only(schema, _ARRAY, place)
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        for name, bound in (("minItems", low), ("maxItems", high)):
            if bound is not None and not (isinstance(bound, int) and 0 <= bound <= _MAX_ITEMS):
                raise InvalidGrammar(f"{name} (at {place}) must be 0 to {_MAX_ITEMS}")
        if high is not None and high < low:
            raise InvalidGrammar(f"minItems is more than maxItems (at {place})")
        if high == 0:
            return self._add('"[]"')
        item = self.rule(schema["items"], f"{place}/items")
        more = self._add(f'"{ITEM_SEPARATOR}" {item}')
        limit = "" if high is None else str(high - 1)
        full = f'"[" {item} {more}{{{max(low - 1, 0)},{limit}}} "]"'
        return self._add(full if low else f'"[]" | {full}')

    def _span(self, schema: dict[str, Any], place: str) -> str:
        self._only(schema, _BESIDE_SPAN, place)
        granularity, source = schema[SPAN], schema.get(SPAN_SOURCE, self._text)
        kind = schema.get("type", "string")
        if kind not in ("string", ["string", "null"], ["null", "string"]):
            raise InvalidGrammar(f"{SPAN} (at {place}) needs the type string, or string and null")
        if granularity is not True and granularity not in (_WORDS, _CHARACTERS):
            raise InvalidGrammar(f"{SPAN} (at {place}) must be true, '{_WORDS}' or '{_CHARACTERS}'")
        if not isinstance(source, str) or not source.strip():
            raise InvalidGrammar(f"there is no text that {SPAN} (at {place}) could be taken from")
        terminal = self._terminal(_CHARACTERS if granularity == _CHARACTERS else _WORDS, source)
        null = "" if kind == "string" else ' | "null"'
        return self._add(f"{terminal}{null}")

    def _text_of(self, schema: dict[str, Any], place: str) -> str:
        self._only(schema, {"type", LARK}, place)
        definition = schema[LARK]
        if not isinstance(definition, str) or schema.get("type", "string") != "string":
            raise InvalidGrammar(f"{LARK} (at {place}) must be a grammar, of a value of type string")
        if definition not in self._texts:
            try:
                text, lines = json_lark(definition, f"text{len(self._texts)}")
            except InvalidGrammar as error:
                raise InvalidGrammar(f"the Lark grammar at {place}: {error}") from error
            self.lines += lines
            self._texts[definition] = self._add(f'"\\"" {text} "\\""')
        return self._texts[definition]

    def _terminal(self, granularity: str, source: str) -> str:
        """Returns a terminal for spans of the source as JSON strings. Pieces are JSON, so that no escape is cut."""
        name = self._sources.get((granularity, source))
        if name is None:
            name = self._sources[granularity, source] = f"SPAN{len(self._sources)}"
            pieces = _PIECES[granularity].findall(source)
            chunks = [json.dumps(piece, ensure_ascii=False)[1:-1] for piece in pieces]
            self.lines.append(f"{name}_TEXT: %regex {json.dumps({'substring_chunks': chunks})}")
            self.lines.append(f'{name}: "\\"" ({name}_TEXT & /{_BOUNDS[granularity]}/) "\\""')
        return name


def _is_annotated(schema: Any) -> bool:
    """Returns True if a span, a hint or a Lark grammar is anywhere in the schema."""
    return isinstance(schema, dict) and (
        not ANNOTATIONS.isdisjoint(schema) or any(_is_annotated(each) for _, each in subschemas(schema))
    )


def _references(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    found = {schema["$ref"]} if isinstance(schema.get("$ref"), str) else set()
    return found.union(*(_references(each) for _, each in subschemas(schema)))


def _quoted(text: str) -> str:
    """Returns a text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)
