"""Grammars that are made to harm a server: deep, slow or large ones, as `parameters.grammar` of a request."""

import json
from typing import Any

from tgi_server.contract import Grammar, GrammarKind


def references(levels: int) -> dict[str, Any]:
    """A JSON schema of definitions that each refer to the next one."""
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(levels)}
    return {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{levels}": {"type": "string", "maxLength": 8}}}


def arrays(levels: int) -> dict[str, Any]:
    """A JSON schema of lists in lists, each of them a definition."""
    chain: dict[str, Any] = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(levels)}
    return {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{levels}": {"type": "boolean"}}}


def rules(levels: int, body: str = "NEXT") -> str:
    """A Lark grammar of rules that each name the next one. body: of each rule, with the next one's name in it."""
    lines = [f"r{i}: {body.replace('NEXT', f'r{i + 1}')}" for i in range(levels)]
    return "\n".join(["start: r0", *lines, f"r{levels}: /[a-z]+/"])


def spans(members: int) -> dict[str, Any]:
    """A JSON schema of so many properties that are taken from the input."""
    return {"type": "object", "properties": {f"p{i}": {"type": "string", "x-span": True} for i in range(members)}}


def mutual(definitions: int, note: str = "") -> dict[str, Any]:
    """A JSON schema of definitions that all refer to each other, and to no span; one stands beside them."""
    names = [f"d{i}" for i in range(definitions)]
    members = {name: {"$ref": f"#/$defs/{name}"} for name in names}
    return {
        "type": "object",
        "properties": {"taken": {"type": "string", "x-span": True}, "free": {"$ref": "#/$defs/d0"}},
        "required": ["taken"],
        "$defs": {name: {"type": "object", "title": note, "properties": members} for name in names},
    }


def opposites(levels: int) -> dict[str, Any]:
    """A JSON schema whose opposite names each definition twice, and so the last of them 2^levels times."""
    chain: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"not": {"$ref": f"#/$defs/d{i + 1}"}}]}
        for i in range(levels)
    }
    return {"not": {"$ref": "#/$defs/d0"}, "$defs": {**chain, f"d{levels}": {"type": "boolean"}}}


def variants(count: int) -> dict[str, Any]:
    """A JSON schema of variants that are hard to tell apart: each comparison leads to all the others."""
    everything = {"anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(count)]}
    members = {f"m{i}": everything for i in range(10)}
    definitions = {f"d{i}": {"type": "object", "properties": members, "required": list(members)} for i in range(count)}
    return {"oneOf": [{"$ref": f"#/$defs/d{i}"} for i in range(count)], "$defs": definitions}


def optional_letters(count: int) -> str:
    """A regular expression that takes minutes to compile."""
    return r"\w?" * count


def schema(value: Any, text: str = "some words") -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value), text)


def regex(value: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, value)


def lark(value: str) -> Grammar:
    return Grammar(GrammarKind.LARK, value)
