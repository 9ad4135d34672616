"""Reads a JSON schema and resolves its references."""

import json
from typing import Any
from urllib.parse import unquote, urljoin

from tgi_server.grammar.errors import InvalidGrammar
from tgi_server.grammar.json_schema.keywords import ANNOTATIONS, MAX_DEPTH, Unenforceable, subschemas

_ANCHORS = ("$anchor", "$dynamicAnchor")


class Document:
    """A JSON schema. Resolves references within it (RFC 6901, and JSON Schema 2020-12, chapters 8.2 and 9).

    root: the whole schema. draft: number of the draft that `$schema` names (3, 4, 6 or 7), else 2020. annotated: True
    if the schema has a span, a hint or a Lark grammar.
    """

    def __init__(self, text: str) -> None:
        """Raises InvalidGrammar for a text that is not a JSON schema, or is nested too deep."""
        try:
            self.root: Any = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidGrammar(f"the JSON schema is not JSON: {error}") from error
        if not isinstance(self.root, dict | bool):
            raise InvalidGrammar(f"the JSON schema must be an object, not {json.dumps(self.root)[:40]}")
        self.draft = _draft(self.root)
        self.annotated = False
        self._bases: dict[int, str] = {}
        self._resources: dict[str, tuple[Any, str]] = {"": (self.root, "#")}
        self._anchors: dict[tuple[str, str], list[tuple[Any, str]]] = {}
        self._dynamic: dict[str, int] = {}
        self._derived: list[Any] = []
        self._scan()

    def resolve(self, schema: dict[str, Any], reference: str) -> tuple[Any, str]:
        """Returns the schema that a reference in `schema` names, and its JSON pointer. Raises Unenforceable."""
        base = self._bases.get(id(schema), "")
        address, _, fragment = reference.partition("#")
        resource = self._resources.get(urljoin(base, address).rstrip("#") if address else base)
        if resource is None:
            raise Unenforceable(f"points outside the schema: {reference!r}")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            named = self._anchors.get((urljoin(base, address) if address else base, fragment))
            if named is None:
                raise Unenforceable(f"points to nothing: {reference!r}")
            return named[0]
        return _schema_at(resource, fragment, reference)

    def resolve_dynamic(self, schema: dict[str, Any], reference: str) -> tuple[Any, str]:
        """Resolves a `$dynamicRef`. Raises Unenforceable if its target depends on the path to it."""
        _, _, name = reference.partition("#")
        if self._dynamic.get(name, 0) > 1:
            raise Unenforceable(f"points to several places, depending on the path to it: {reference!r}")
        return self.resolve(schema, reference)

    def derived(self, schema: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
        """Registers a new `schema`, so that its references are resolved relative to `source`. Returns it."""
        if id(source) in self._bases:
            self._bases[id(schema)] = self._bases[id(source)]
        self._derived.append(schema)  # kept, so that no other object gets its id
        return schema

    def _scan(self) -> None:
        """Finds the identifiers and anchors of all subschemas. Raises InvalidGrammar if they are nested too deep."""
        identifier = "id" if self.draft <= 4 else "$id"
        waiting: list[tuple[Any, str, str, int]] = [(self.root, "#", "", 0)]
        while waiting:
            schema, place, base, depth = waiting.pop()
            if isinstance(schema, bool):
                continue
            if not isinstance(schema, dict):
                continue  # reported when it is translated, if it ever is
            if depth > MAX_DEPTH:
                raise InvalidGrammar(f"the JSON schema is nested more than {MAX_DEPTH} levels deep")
            self.annotated = self.annotated or not ANNOTATIONS.isdisjoint(schema)
            name = schema.get(identifier)
            if isinstance(name, str) and not ("$ref" in schema and self.draft <= 7):
                if name.startswith("#"):
                    self._anchors.setdefault((base, name[1:]), []).append((schema, place))
                else:
                    base = urljoin(base, name).rstrip("#")
                    self._resources.setdefault(base, (schema, place))
            for keyword in _ANCHORS:
                if isinstance(anchor := schema.get(keyword), str):
                    self._anchors.setdefault((base, anchor), []).append((schema, place))
            if isinstance(anchor := schema.get("$dynamicAnchor"), str):
                self._dynamic[anchor] = self._dynamic.get(anchor, 0) + 1
            if schema.get("$recursiveAnchor") is True:
                self._dynamic[""] = self._dynamic.get("", 0) + 1
            if base:
                self._bases[id(schema)] = base
            waiting.extend((each, f"{place}/{name}", base, depth + 1) for name, each in subschemas(schema))


def _at_pointer(root: Any, pointer: str) -> Any:
    """Returns the part of a document that a JSON pointer names. Raises LookupError if there is none."""
    target = root
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        elif isinstance(target, dict) and key in target:
            target = target[key]
        else:
            raise LookupError(key)
    return target


def _schema_at(resource: tuple[Any, str], pointer: str, reference: str) -> tuple[Any, str]:
    root, place = resource
    try:
        target = _at_pointer(root, pointer)
    except LookupError:
        raise Unenforceable(f"points to nothing: {reference!r}") from None
    if not isinstance(target, dict | bool):
        raise Unenforceable(f"points to something that is not a schema: {reference!r}")
    return target, place + pointer


def _draft(root: Any) -> int:
    """Returns the number of the draft that `$schema` names; 2020 for newer drafts and if it names none."""
    named = str(root.get("$schema", "")) if isinstance(root, dict) else ""
    return next((number for number in (3, 4, 6, 7) if f"draft-0{number}" in named), 2020)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
