"""Rewrites regular expressions in Python's syntax for llguidance, which uses the syntax of Rust's `regex` crate.

Where the two differ, the result matches no more than Python's `re.fullmatch` does.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from tgi_server.grammar.errors import InvalidGrammar

_Node = tuple[Any, Any]

# ASCII only: beyond it, Python and Rust differ in what counts as a letter or a digit.
_CLASSES = {
    op.CATEGORY_DIGIT: "0-9",
    op.CATEGORY_NOT_DIGIT: r"\P{Nd}",
    op.CATEGORY_SPACE: r" \t\n\r\f\v",
    op.CATEGORY_NOT_SPACE: r"\x21-\x7e\p{L}\p{N}\p{P}",
    op.CATEGORY_WORD: "0-9A-Za-z_",
    op.CATEGORY_NOT_WORD: r"\x00-\x2f\x3a-\x40\x5b-\x5e\x60\x7b-\x7f",
}
_NOT_SUPPORTED = {
    op.ASSERT: "look-ahead and look-behind are",
    op.ASSERT_NOT: "look-ahead and look-behind are",
    op.GROUPREF: "back-references are",
    op.GROUPREF_EXISTS: "conditional groups are",
    op.ATOMIC_GROUP: "atomic groups are",
    op.POSSESSIVE_REPEAT: "possessive repetitions are",
}
_STARTS = (op.AT_BEGINNING, op.AT_BEGINNING_STRING)
_ENDS = (op.AT_END, op.AT_END_STRING)
_KNOWN_FLAGS = re.IGNORECASE | re.DOTALL | re.VERBOSE | re.UNICODE | re.ASCII


def rust_regex(pattern: str) -> str:
    """Rewrites a regular expression for Rust's `regex` crate. Raises InvalidGrammar if it cannot be enforced.

    A pattern that only Rust knows, such as `\\p{Greek}`, is returned unchanged.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of what some later Python may read differently
            tree = parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        if r"\p" in pattern or r"\P" in pattern:
            return pattern
        raise InvalidGrammar(f"the regular expression cannot be read: {error}") from error
    if tree.state.flags & ~_KNOWN_FLAGS:
        raise InvalidGrammar("of the flags of regular expressions, only i, s, x, a and u are supported")
    return _RegexWriter(tree.state.flags).whole(tree)


class _RegexWriter:
    def __init__(self, flags: int) -> None:
        self._flags = flags

    def whole(self, tree: Any) -> str:
        """Writes the expression without anchors at its ends: the whole text has to match in any case."""
        nodes = _unwrapped(list(tree))
        while nodes and nodes[0][0] is op.AT and nodes[0][1] in _STARTS:
            nodes = nodes[1:]
        while nodes and nodes[-1][0] is op.AT and nodes[-1][1] in _ENDS:
            nodes = nodes[:-1]
        prefix = "(?i)" if self._flags & re.IGNORECASE else ""
        if len(nodes) == 1 and nodes[0][0] is op.BRANCH:
            return prefix + "|".join(_RegexWriter(self._flags).whole(branch) for branch in nodes[0][1][1])
        return prefix + self._sequence(nodes)

    def _sequence(self, nodes: Sequence[_Node]) -> str:
        return "".join(self._node(kind, argument) for kind, argument in nodes)

    def _node(self, kind: Any, argument: Any) -> str:
        if kind in _NOT_SUPPORTED:
            raise InvalidGrammar(f"{_NOT_SUPPORTED[kind]} not supported in regular expressions")
        if kind is op.AT:
            raise InvalidGrammar("anchors and word boundaries are supported at the ends of a regular expression only")
        writers: dict[Any, Callable[[Any], str]] = {
            op.LITERAL: _literal,
            op.NOT_LITERAL: lambda character: f"[^{_literal(character)}]",
            op.ANY: lambda _: r"(?s:.)" if self._flags & re.DOTALL else r"[^\n]",
            op.IN: self._set,
            op.BRANCH: lambda branches: "(?:" + "|".join(self._sequence(each) for each in branches[1]) + ")",
            op.SUBPATTERN: self._group,
            op.MAX_REPEAT: self._repeat,
            op.MIN_REPEAT: self._repeat,
        }
        return writers[kind](argument)

    def _set(self, members: Sequence[_Node]) -> str:
        negated = members[0][0] is op.NEGATE
        if negated and any(kind is op.CATEGORY for kind, _ in members):
            return self._negated_set(members[1:])
        return f"[{'^' if negated else ''}{''.join(map(_member, members[negated:]))}]"

    def _negated_set(self, members: Sequence[_Node]) -> str:
        """Writes a set of the characters that are in no member. Complements of categories are smaller than Python's."""
        parts = [
            f"[{_CLASSES[_opposite(argument)]}]" if kind is op.CATEGORY else f"[^{_member((kind, argument))}]"
            for kind, argument in members
        ]
        return f"[{'&&'.join(parts)}]"

    def _group(self, argument: Any) -> str:
        _, added, removed, content = argument
        if (added | removed) & ~_KNOWN_FLAGS:
            raise InvalidGrammar("of the flags of regular expressions, only i, s, x, a and u are supported")
        inner = _RegexWriter((self._flags | added) & ~removed)._sequence(content)
        on = "i" if added & re.IGNORECASE else ""
        off = "-i" if removed & re.IGNORECASE else ""
        return f"(?{on}{off}:{inner})"

    def _repeat(self, argument: Any) -> str:
        """Writes a repetition. Laziness is ignored: it does not change which whole texts match."""
        low, high, content = argument
        upper = "" if high is op.MAXREPEAT else str(high)
        return f"(?:{self._sequence(content)}){{{low},{upper}}}"


def _unwrapped(nodes: list[_Node]) -> list[_Node]:
    """Returns the nodes without groups that enclose all of them."""
    while len(nodes) == 1 and nodes[0][0] is op.SUBPATTERN and not nodes[0][1][1] and not nodes[0][1][2]:
        nodes = list(nodes[0][1][3])
    return nodes


def _member(node: _Node) -> str:
    kind, argument = node
    if kind is op.RANGE:
        return f"{_literal(argument[0])}-{_literal(argument[1])}"
    return _CLASSES[argument] if kind is op.CATEGORY else _literal(argument)


def _opposite(category: Any) -> Any:
    kind = str(category).removeprefix("CATEGORY_")
    return getattr(op, f"CATEGORY_{kind.removeprefix('NOT_') if kind.startswith('NOT_') else f'NOT_{kind}'}")


def _literal(character: int) -> str:
    if 0xD800 <= character <= 0xDFFF:
        raise InvalidGrammar("surrogates (U+D800 to U+DFFF) are not supported in regular expressions")
    text = chr(character)
    return text if text.isascii() and (text.isalnum() or text == " ") else f"\\x{{{character:x}}}"
