"""Rewrites a client's Lark grammar of a text as a grammar of that text inside a JSON string.

JSON writes quotes, backslashes and control characters as escapes, which all begin with a backslash. llguidance's lexer
takes the longest terminal, and looks back one byte only: a terminal that could continue with one escape would hide
another terminal that begins with another escape. Therefore

- a grammar without recursion becomes one terminal, which is exact;
- in any other grammar, terminals with escapes become rules of pieces, and every escape is a piece of its own.
"""

import json
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from typing import Any

from tgi_server.grammar.errors import InvalidGrammar
from tgi_server.grammar.lark_reading import GrammarTrees
from tgi_server.grammar.regex_reading import (
    Both,
    Characters,
    Lexeme,
    Named,
    OneOf,
    Repeated,
    Sequenced,
    Without,
)

_SHORT = {ord(each): json.dumps(each)[2] for each in '"\\\b\f\n\r\t'}
_ANY = r'/([^\x00-\x1f"\\]|\\["\\bfnrt]|\\u00[01][0-9a-fA-F])*/'
_NOTHING = "[a&&b]"


def json_lark(definition: str, prefix: str) -> tuple[str, list[str]]:
    """Returns the name of a rule or terminal that matches the grammar's texts as JSON writes them, and its definition.

    The definition is a list of Lark lines. prefix: begins all names in them. Raises InvalidGrammar if the grammar is
    invalid, or has something that is not supported.
    """
    writer = _JsonWriter(GrammarTrees(definition), prefix)
    return writer.start(), writer.lines


class _JsonWriter:
    def __init__(self, grammar: GrammarTrees, prefix: str) -> None:
        self.lines: list[str] = []
        self._grammar = grammar
        self._prefix = prefix
        self._definitions = {**grammar.terminals, **grammar.rules}
        self._written: dict[tuple[str, Any], str] = {}
        self._number = 0
        self._plain = dict.fromkeys(grammar.imported, True)
        graph = self._graph()
        self._recursive = _has_cycle(graph)
        for name in TopologicalSorter({name: graph[name] & grammar.terminals.keys() for name in graph}).static_order():
            self._plain[name] = name in grammar.terminals and self._is_plain(self._definitions[name])

    def start(self) -> str:
        return self._rule(Named("start")) if self._recursive else self._terminal(Named("start"))

    def _graph(self) -> dict[str, set[str]]:
        """Returns, for each definition that the grammar uses, the names of the definitions in it."""
        graph: dict[str, set[str]] = {}
        waiting = {"start"}.union(*map(_names, self._grammar.ignored)) & self._definitions.keys()
        while waiting:
            name = waiting.pop()
            graph[name] = set(_names(self._definitions[name])) & self._definitions.keys()
            waiting |= graph[name] - graph.keys()
        return graph

    def _once(self, kind: str, node: Any, write: Callable[[], str], *, rule: bool) -> str:
        """Returns the name of the definition of a node, after writing it if there is none yet."""
        if (kind, node) not in self._written:
            self._number += 1
            name = f"{self._prefix}_{self._number}"
            name = self._written[kind, node] = name.lower() if rule else name.upper()
            self.lines.append(f"{name}: {write()}")
        return self._written[kind, node]

    def _terminal(self, node: Any) -> str:
        """Returns a terminal that matches a node's texts as JSON writes them."""
        regex = _regex(node)
        if regex is not None:
            return f"/{regex}/" if regex else '""'
        return self._once("terminal", node, lambda: self._terminal_body(node), rule=False)

    def _terminal_body(self, node: Any) -> str:
        match node:
            case Named(name) if name in self._grammar.imported:
                self.lines.append(f"%import common.{self._grammar.imported[name]} -> {self._prefix.upper()}_{name}")
                return f"{self._prefix.upper()}_{name}"
            case Named(name):
                return self._terminal(self._definitions[name])
            case Lexeme(terminal):
                return " ".join([self._terminal(terminal), *self._ignored(self._terminal)])
            case Sequenced(parts):
                return " ".join(map(self._terminal, parts))
            case OneOf(choices):
                return " | ".join(map(self._terminal, choices))
            case Both(each):
                return " & ".join(map(self._terminal, each))
            case Without(texts):
                return f"{_ANY} & ~{self._terminal(texts)}"
            case Repeated(item, low, high):
                return _times(self._terminal(item), low, high)
        raise AssertionError(node)

    def _ignored(self, write: Callable[[Any], str]) -> Iterator[str]:
        if self._grammar.ignored:
            yield f"{write(OneOf(tuple(self._grammar.ignored)))}*"

    def _rule(self, node: Any) -> str:
        """Returns a rule that matches the texts of a rule's node as JSON writes them."""
        return self._once("rule", node, lambda: self._rule_body(node), rule=True)

    def _rule_body(self, node: Any) -> str:
        match node:
            case Named(name):
                return self._rule(self._definitions[name])
            case Lexeme(terminal):
                return " ".join([self._pieces(terminal), *self._ignored(self._pieces)])
            case Sequenced(parts):
                return " ".join(map(self._rule, parts)) or '""'
            case OneOf(choices):
                return " | ".join(map(self._rule, choices))
            case Repeated(item, low, high):
                return _times(self._rule(item), low, high)
        raise AssertionError(node)

    def _pieces(self, node: Any) -> str:
        """Returns a rule or terminal that matches a terminal in JSON. Each escape begins a piece of its own."""
        node = self._resolved(node)
        if self._is_plain(node):
            return self._terminal(node)
        return self._once("pieces", node, lambda: self._pieces_body(node), rule=True)

    def _pieces_body(self, node: Any) -> str:
        match node:
            case Named(name):
                return self._pieces(self._definitions[name])
            case Characters(plain, escaped):
                return " | ".join(f"/{regex}/" for regex in (plain, _escapes(escaped)) if regex)
            case Sequenced(parts):
                runs = ((plain, list(run)) for plain, run in groupby(parts, self._is_plain))
                named = (
                    [self._terminal(run[0] if len(run) == 1 else Sequenced(tuple(run)))]
                    if plain
                    else map(self._pieces, run)
                    for plain, run in runs
                )
                return " ".join(each for names in named for each in names)
            case OneOf(choices):
                return " | ".join(map(self._pieces, choices))
            case Repeated(item, low, None) if low <= 1:
                return _times(self._runs(self._resolved(item)), low, None)
            case Repeated(item, low, high):
                if high != 1 and self._has_characters(item):
                    raise InvalidGrammar(
                        f"the repetition {{{low},{'' if high is None else high}}} of characters that JSON escapes is "
                        "not supported in a grammar with recursive rules; use * or +"
                    )
                return _times(self._pieces(item), low, high)
        operator = "~" if isinstance(node, Without) else "&"
        raise InvalidGrammar(
            f"{operator} on texts with characters that JSON escapes is not supported in a grammar with recursive rules"
        )

    def _runs(self, item: Any) -> str:
        """Returns the pieces of an item that is repeated without a limit. A run of plain characters is one piece."""
        match item:
            case Characters(plain, escaped) if plain:
                pieces = [f"/{plain}+/", *([f"/{_escapes(escaped)}/"] if escaped else [])]
                return self._once("runs", item, lambda: " | ".join(pieces), rule=True)
            case OneOf(choices):
                return self._once(
                    "runs",
                    item,
                    lambda: " | ".join(self._runs(self._resolved(choice)) for choice in choices),
                    rule=True,
                )
        return self._pieces(item)

    def _has_characters(self, item: Any) -> bool:
        item = self._resolved(item)
        if isinstance(item, OneOf):
            return any(map(self._has_characters, item.choices))
        return isinstance(item, Characters) and bool(item.plain)

    def _resolved(self, node: Any) -> Any:
        """Returns the definition that a name stands for, if it is a name, characters or a choice; else the node."""
        while isinstance(node, Named) and isinstance(self._definitions.get(node.name), Named | Characters | OneOf):
            node = self._definitions[node.name]
        return node

    def _is_plain(self, node: Any) -> bool:
        """Returns True for a terminal whose texts never have an escape in JSON."""
        match node:
            case Characters(_, escaped):
                return not escaped
            case Named(name):
                return self._plain[name]
            case Sequenced(parts) | OneOf(parts):
                return all(map(self._is_plain, parts))
            case Both(parts):
                return any(map(self._is_plain, parts))
            case Repeated(item):
                return self._is_plain(item)
        return False


def _names(tree: Any) -> Iterator[str]:
    if isinstance(tree, Named):
        yield tree.name
    elif isinstance(tree, tuple):
        for each in tree:
            yield from _names(each)


def _has_cycle(graph: dict[str, set[str]]) -> bool:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def _times(item: str, low: int, high: int | None) -> str:
    if high is None:
        return f"{item}{'*' if low == 0 else '+' if low == 1 else f'{{{low},}}'}"
    return f"{item}?" if (low, high) == (0, 1) else f"{item} ~ {low}..{high}"


def _regex(node: Any) -> str | None:
    """Returns a regular expression of a node's texts in JSON; None if the node is not made of characters alone."""
    match node:
        case Characters(plain, escaped):
            forms = [each for each in (plain, _escapes(escaped)) if each]
            return f"(?:{'|'.join(forms)})" if len(forms) > 1 else (forms or [_NOTHING])[0]
        case Sequenced(parts) | OneOf(parts):
            found = [_regex(each) for each in parts]
            if None in found:
                return None
            joined = ("" if isinstance(node, Sequenced) else "|").join(map(str, found))
            return joined if isinstance(node, Sequenced) else f"(?:{joined})"
        case Repeated(item, low, high):
            inner = _regex(item)
            return None if inner is None else f"(?:{inner}){{{low},{'' if high is None else high}}}"
    return None


def _escapes(characters: frozenset[int]) -> str:
    """Returns a regular expression of the escapes that JSON writes for the characters; empty if there are none."""
    short = "".join(sorted(_SHORT[character] for character in characters if character in _SHORT)).replace("\\", r"\\")
    forms = [f"[{short}]"] if short else []
    for high in range(2):
        low = "".join(
            f"{each:x}{each:X}" if each > 9 else str(each) for each in range(16) if _long(characters, high, each)
        )
        forms += [f"u00{high}[{low}]"] if low else []
    return rf"\\(?:{'|'.join(forms)})" if forms else ""


def _long(characters: frozenset[int], high: int, low: int) -> bool:
    """Returns True if the character 16 * high + low is one of `characters` and has no short escape."""
    return 16 * high + low in characters - _SHORT.keys()
