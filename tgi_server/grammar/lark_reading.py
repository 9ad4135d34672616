"""Parses clients' Lark grammars into trees. Refuses constructs that cannot be rewritten for JSON, by name.

The dialect is llguidance's, which checks a grammar before it is parsed here, so that its syntax is known to be valid.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from llguidance import LLMatcher

from tgi_server.grammar.errors import InvalidGrammar, reason
from tgi_server.grammar.regex_reading import (
    BOUNDS,
    Both,
    Lexeme,
    Named,
    Repeated,
    Sequenced,
    Without,
    characters,
    choice_of,
    pattern_of,
    read_regex,
    sequence_of,
)

# Terminals of Lark's library that may contain characters that JSON escapes. The others can be imported unchanged.
_COMMON = {
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+([^\/*][^*]*\*+)*\/",
    "SQL_COMMENT": r"--[^\n]*",
}
_TOKEN = re.compile(
    r"""(?P<skipped>(?:\#|//)[^\n]*|[ \t]+)
    |(?P<line>[\r\n][\r\n \t]*(?P<goes_on>\|)?)
    |(?P<string>"(?:\\.|[^"\\])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<name>!?[_?]?[a-z][_a-z0-9-]*|_?[A-Z][_A-Z0-9-]*)
    |(?P<times>~[ \t]*(?P<low>\d+)(?:[ \t]*\.\.[ \t]*(?P<high>\d+))?)
    |(?P<braces>\{[ \t]*(?:(?P<least>\d+)[ \t]*)?(?:(?P<comma>,)[ \t]*(?:(?P<most>\d+)[ \t]*)?)?\})
    |(?P<op>[+*?])
    |(?P<range>\.\.)|(?P<alias>->)
    |(?P<mark>[:|&~()\[\]])
    |(?P<other>%[a-z]+|<[^<>\s]+>|@[\w-]+|.)""",
    re.VERBOSE | re.DOTALL,
)
_HEX = re.compile(r"\\(?:x(..)|.)", re.DOTALL)


class GrammarTrees:
    """A parsed Lark grammar.

    rules, terminals: the tree of each definition, by its name. imported: the names in Lark's library of terminals
    without escaped characters, by their names here. ignored: the trees of `%ignore`, which may follow every terminal.
    """

    def __init__(self, definition: str) -> None:
        """Raises InvalidGrammar if the grammar is invalid, or has a construct that is not supported."""
        if fault := LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(definition)):
            raise InvalidGrammar(reason(fault)[:500])
        self.rules: dict[str, Any] = {}
        self.terminals: dict[str, Any] = {}
        self.imported: dict[str, str] = {}
        self.ignored: list[Any] = []
        for item in _items(definition):
            self._read(item)

    def _read(self, item: list[re.Match[str]]) -> None:
        """Reads a definition or a statement. item: its tokens."""
        first = item[0]
        if first["name"]:
            name = first[0].lstrip("!?")
            if len(item) < 2 or item[1][0] != ":":
                raise _unsupported(f"{item[1][0]} after the name {name}" if len(item) > 1 else name)
            is_rule = not name.isupper()
            (self.rules if is_rule else self.terminals)[name] = _Tree(item[2:], self._atoms(is_rule)).choices()
        elif first[0] == "%ignore":
            self.ignored.append(_Tree(item[1:], self._atoms(False)).choices())
        elif first[0] == "%import":
            names = [each[0] for each in item[1:] if each["name"]]
            listed = any(each[0] == "(" for each in item)
            aliased = any(each["alias"] for each in item)
            for name in names[1:] if listed else names[1:2]:
                local = names[-1] if aliased else name
                if not local.isupper():
                    raise _unsupported(f"the terminal's name {local} in lower case")
                if name in _COMMON:
                    self.terminals[local] = read_regex(_COMMON[name])
                else:
                    self.imported[local] = name
        else:
            raise _unsupported(first[0])

    def _atoms(self, in_rule: bool) -> "Callable[[list[re.Match[str]], int], tuple[Any, int]]":
        """Returns a reader of atoms: from tokens and an index, it returns a node and the number of tokens read."""

        def read(tokens: list[re.Match[str]], at: int) -> tuple[Any, int]:
            token, size = tokens[at], 1
            if token["name"]:
                is_rule = not token[0].isupper()
                return (Named(token[0]) if is_rule or not in_rule else Lexeme(Named(token[0]))), 1
            if token["string"] and at + 1 < len(tokens) and tokens[at + 1]["range"]:
                low, high = _text(token[0]), _text(tokens[at + 2][0])
                found, size = characters(f"[{pattern_of(low)}-{pattern_of(high)}]"), 3
            elif token["string"]:
                flags = "i" if token[0].endswith("i") else ""
                found = sequence_of([characters(pattern_of(each), flags) for each in _text(token[0].removesuffix("i"))])
            elif token["regex"]:
                pattern, _, flags = token[0][1:].rpartition("/")
                found = read_regex(pattern, flags)
            else:
                raise _unsupported(token[0])
            return (Lexeme(found) if in_rule and found != Sequenced(()) else found), size

        return read


class _Tree:
    """Parses the body of a definition: choices of sequences of repeated atoms."""

    def __init__(
        self, tokens: list[re.Match[str]], atom: Callable[[list[re.Match[str]], int], tuple[Any, int]]
    ) -> None:
        self._tokens = tokens
        self._atom = atom
        self._at = 0

    def choices(self) -> Any:
        return choice_of(self._separated(self._both, "|"))

    def _both(self) -> Any:
        found = self._separated(self._sequence, "&")
        return found[0] if len(found) == 1 else Both(tuple(found))

    def _separated(self, read: Callable[[], Any], mark: str) -> list[Any]:
        found = [read()]
        while self._next() == mark:
            self._at += 1
            found.append(read())
        return found

    def _next(self) -> str:
        """Returns the text of the next token, `|` for a line that begins with one; empty at the end."""
        if self._at == len(self._tokens):
            return ""
        token = self._tokens[self._at]
        return "|" if token["line"] else token[0]

    def _sequence(self) -> Any:
        parts = []
        while self._next() not in ("", "|", "&", ")", "]"):
            if self._tokens[self._at]["alias"]:
                self._at += 2
            else:
                parts.append(self._repeated())
        return sequence_of(parts)

    def _repeated(self) -> Any:
        negated = self._next() == "~"
        self._at += negated
        opening = self._next()
        if opening in ("(", "["):
            self._at += 1
            found = self.choices()
            self._at += 1
            found = Repeated(found, 0, 1) if opening == "[" else found
        else:
            found, size = self._atom(self._tokens, self._at)
            self._at += size
        found = Without(found) if negated else found
        while (bounds := self._bounds()) is not None:
            found = Repeated(found, *bounds)
            self._at += 1
        return found

    def _bounds(self) -> tuple[int, int | None] | None:
        """Returns the bounds of a repetition if one comes next; None otherwise."""
        token = self._tokens[self._at] if self._at < len(self._tokens) else None
        if token is None:
            return None
        if token["op"]:
            return BOUNDS[token[0]]
        if token["times"]:
            return int(token["low"]), int(token["high"] or token["low"])
        if token["braces"]:
            least = int(token["least"] or 0)
            return least, int(token["most"]) if token["most"] else None if token["comma"] else least
        return None


def _items(definition: str) -> Iterator[list[re.Match[str]]]:
    """Yields the tokens of each definition or statement."""
    item: list[re.Match[str]] = []
    at = 0
    while token := _TOKEN.match(definition, at):
        at = token.end()
        if token["line"] and not token["goes_on"]:
            if item:
                yield item
            item = []
        elif not token["skipped"]:
            item.append(token)
    if item:
        yield item


def _text(string: str) -> str:
    """Returns the text of a string literal, which may have the escapes of JSON, and \\x."""
    text: str = json.loads(_HEX.sub(lambda found: rf"\u00{found[1]}" if found[1] else found[0], string))
    return text


def _unsupported(construct: str) -> InvalidGrammar:
    return InvalidGrammar(f"{construct[:100]} is not supported in the Lark grammar of a tool's text")
