"""Lark grammars of clients, read into trees. What is no character, sequence or choice of such is refused by name.

The dialect is llguidance's, with the regular expressions of Rust's `regex` crate: llguidance has compiled a grammar
before it is read here. What a class of characters contains is asked of llguidance, too.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from tgi_server.grammar.errors import InvalidGrammar, reason

# The characters that a JSON string has in another form only.
ESCAPED = frozenset(map(ord, '"\\')) | frozenset(range(0x20))


class Characters(NamedTuple):
    """One character. plain: a regular expression of those that JSON writes as they are; escaped: the others."""

    plain: str
    escaped: frozenset[int]


class Sequenced(NamedTuple):
    parts: tuple[Any, ...]


class Choice(NamedTuple):
    choices: tuple[Any, ...]


class Both(NamedTuple):
    """The texts that are in all of them."""

    all: tuple[Any, ...]


class Without(NamedTuple):
    """All texts but these."""

    texts: Any


class Repeated(NamedTuple):
    item: Any
    low: int
    high: int | None


class Named(NamedTuple):
    name: str


class Lexeme(NamedTuple):
    """A terminal in a rule. What the grammar ignores may follow it."""

    terminal: Any


# Lark's library: the terminals with characters that JSON escapes. The others can be imported as they are.
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
    |(?P<line>(?:\r?\n)+[ \t]*(?P<goes_on>\|)?)
    |(?P<string>"(?:\\.|[^"\\])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<name>!?[_?]?[a-z][_a-z0-9-]*|_?[A-Z][_A-Z0-9-]*)
    |(?P<times>~[ \t]*(?P<low>\d+)(?:[ \t]*\.\.[ \t]*(?P<high>\d+))?)
    |(?P<braces>\{[ \t]*(?P<least>\d*)[ \t]*(?P<comma>,)?[ \t]*(?P<most>\d*)[ \t]*\})
    |(?P<op>[+*?])
    |(?P<range>\.\.)|(?P<alias>->)
    |(?P<mark>[:|&~()\[\]])
    |(?P<other>%[a-z]+|<[^<>\s]+>|@[\w-]+|.)""",
    re.VERBOSE | re.DOTALL,
)
_IN_REGEX = re.compile(
    r"""(?P<open>\((?:\?P?<\w+>|\?(?P<scoped>[a-zA-Z-]*):)?) | \(\?(?P<flags>[a-zA-Z-]+)\)
    |(?P<close>\)) | (?P<bar>\|)
    |(?P<repeat>(?:[*+?]|\{\s*(?P<low>\d+)\s*(?P<comma>,)?\s*(?P<high>\d*)\s*\})(?P<lazy>\??))
    |(?P<set>\[) | (?P<any>\.) | (?P<anchor>[$^])
    |(?P<escape>\\(?:[pP](?:\{[^}]*\}|.)|[xuU]\{[^}]*\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.))
    |(?P<literal>.)""",
    re.VERBOSE | re.DOTALL,
)
_IN_SET = re.compile(r"(?P<open>\[\^?\]?)|(?P<close>\])|\\.|[^\\\[\]]+", re.DOTALL)
_OPS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_HEX = re.compile(r"\\(?:x(..)|.)", re.DOTALL)
_STARTED = '[({~"/'


class LarkGrammar:
    """rules, terminals: the tree of each by its name. imported: plain terminals of Lark's library, by their names here.

    ignored: what may stand behind every terminal of a rule.
    """

    def __init__(self, definition: str) -> None:
        """Raises InvalidGrammar that names what is wrong, or what is not supported."""
        if fault := LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(definition)):
            raise InvalidGrammar(reason(fault)[:500])
        self.rules: dict[str, Any] = {}
        self.terminals: dict[str, Any] = {}
        self.imported: dict[str, str] = {}
        self.ignored: list[Any] = []
        for item in _items(definition):
            self._read(item)

    def _read(self, item: list[re.Match[str]]) -> None:
        """Reads a definition or a statement."""
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
        """Returns what reads the smallest parts of definitions, and how many tokens each of them takes."""

        def read(tokens: list[re.Match[str]], at: int) -> tuple[Any, int]:
            token, size = tokens[at], 1
            if token["name"]:
                is_rule = not token[0].isupper()
                return (Named(token[0]) if is_rule or not in_rule else Lexeme(Named(token[0]))), 1
            if token["string"] and at + 1 < len(tokens) and tokens[at + 1]["range"]:
                low, high = _text(token[0]), _text(tokens[at + 2][0])
                found, size = characters(f"[{_written(low)}-{_written(high)}]"), 3
            elif token["string"]:
                flags = "i" if token[0].endswith("i") else ""
                found = _sequence([characters(_written(each), flags) for each in _text(token[0].removesuffix("i"))])
            elif token["regex"]:
                pattern, _, flags = token[0][1:].rpartition("/")
                found = read_regex(pattern, flags)
            else:
                raise _unsupported(token[0])
            return (Lexeme(found) if in_rule and found != Sequenced(()) else found), size

        return read


class _Tree:
    """Reads choices of sequences of repeated parts, which Lark and regular expressions have alike."""

    def __init__(
        self, tokens: list[re.Match[str]], atom: Callable[[list[re.Match[str]], int], tuple[Any, int]]
    ) -> None:
        self._tokens = tokens
        self._atom = atom
        self._at = 0

    def choices(self) -> Any:
        return _choice(self._separated(self._both, "|"))

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
        """Returns the mark that comes next; something else for other tokens, and nothing at the end."""
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
        return _sequence(parts)

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
        """Returns how often the last part is repeated, if that comes next."""
        token = self._tokens[self._at] if self._at < len(self._tokens) else None
        if token is None:
            return None
        if token["op"]:
            return _OPS[token[0]]
        if token["times"]:
            return int(token["low"]), int(token["high"] or token["low"])
        if token["braces"]:
            least = int(token["least"] or 0)
            return least, int(token["most"]) if token["most"] else None if token["comma"] else least
        return None


def _items(definition: str) -> Iterator[list[re.Match[str]]]:
    """Yields the tokens of each definition or statement."""
    item: list[re.Match[str]] = []
    for token in _TOKEN.finditer(definition):
        if token["line"] and not token["goes_on"]:
            if item:
                yield item
            item = []
        elif not token["skipped"]:
            item.append(token)
    if item:
        yield item


def read_regex(pattern: str, flags: str = "") -> Any:
    """Returns the tree of a regular expression."""
    try:
        return _RegexReader(pattern, frozenset(flags)).whole()
    except InvalidGrammar as error:
        raise InvalidGrammar(f"{error} in the regular expression /{pattern[:100]}/") from None


class _RegexReader:
    def __init__(self, pattern: str, flags: frozenset[str]) -> None:
        self._pattern = pattern
        self._flags = flags
        self._at = 0

    def whole(self) -> Any:
        """Returns the tree up to the end of the group, or of the expression."""
        outer = self._flags
        self._check_flags()
        choices: list[list[Any]] = [[]]
        while (found := _IN_REGEX.match(self._pattern, self._at)) and not found["close"]:
            self._at = found.end()
            if found["bar"]:
                choices.append([])
            elif found["flags"]:
                self._set_flags(found["flags"])
            elif found["repeat"]:
                choices[-1].append(_repeated(choices[-1].pop(), found))
            else:
                choices[-1].append(self._atom(found))
        self._at += 1
        self._flags = outer
        return _choice([_sequence(parts) for parts in choices])

    def _atom(self, found: re.Match[str]) -> Any:
        if found["open"]:
            outer = self._flags
            self._set_flags(found["scoped"] or "")
            inner = self.whole()
            self._flags = outer
            return inner
        if found["anchor"]:
            raise InvalidGrammar(f"anchors are not supported ({found[0]})")
        kept = "".join(sorted(self._flags & {"i"}))
        if found["any"]:
            return characters(r"(?s:.)" if "s" in self._flags else ".")
        if found["set"]:
            return characters(self._set(found.start()), kept)
        return characters(found[0], kept)

    def _set(self, start: int) -> str:
        """Returns the set of characters that begins at `start`."""
        depth, at = 0, start
        while found := _IN_SET.match(self._pattern, at):
            at = found.end()
            depth += bool(found["open"]) - bool(found["close"])
            if depth == 0:
                break
        self._at = at
        return self._pattern[start:at]

    def _set_flags(self, written: str) -> None:
        on, _, off = written.partition("-")
        self._flags = (self._flags | frozenset(on)) - frozenset(off)
        if "u" in off:
            raise InvalidGrammar("the flag -u is not supported")
        self._check_flags()

    def _check_flags(self) -> None:
        if others := self._flags - {*"imsu"}:
            raise InvalidGrammar(f"the flag {min(others)} is not supported")


def _repeated(item: Any, found: re.Match[str]) -> Any:
    if found["lazy"]:
        raise InvalidGrammar(f"lazy repetitions are not supported ({found[0]})")
    if found[0] in _OPS:
        return Repeated(item, *_OPS[found[0]])
    low = int(found["low"])
    return Repeated(item, low, int(found["high"]) if found["high"] else None if found["comma"] else low)


def _choice(found: Sequence[Any]) -> Any:
    """Returns a choice; of single characters, that is one character."""
    if len(found) > 1 and all(isinstance(each, Characters) for each in found):
        plain = "|".join(each.plain for each in found if each.plain)
        return Characters(
            f"(?:{plain})" if "|" in plain else plain, frozenset().union(*(each.escaped for each in found))
        )
    return found[0] if len(found) == 1 else Choice(tuple(found))


def _sequence(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else Sequenced(tuple(parts))


def _text(string: str) -> str:
    """Returns the text of a string literal, in which JSON's escapes are known, and \\x."""
    text: str = json.loads(_HEX.sub(lambda found: rf"\u00{found[1]}" if found[1] else found[0], string))
    return text


def _written(text: str) -> str:
    """Returns a text as a regular expression."""
    return "".join(rf"\x{{{ord(each):x}}}" if each.isascii() and not each.isalnum() else each for each in text)


@lru_cache(10_000)
def characters(pattern: str, flags: str = "") -> Characters:
    """Returns the characters of which a regular expression matches one each."""
    found = pattern if not flags else f"(?{flags}:{pattern})"
    if len(pattern) == 1 and pattern.isalnum():
        return Characters(found, frozenset())
    first = _first_bytes(found)
    escaped = first & ESCAPED
    if first == escaped:
        return Characters("", escaped)
    if not escaped:
        return Characters(found, escaped)
    inner = r"\x00-\x{10FFFF}" if pattern == "(?s:.)" else r"^\n" if pattern == "." else pattern
    plain = rf"[[{inner}]--[\x00-\x1f\x22\x5c]]"
    return Characters(plain if not flags else f"(?{flags}:{plain})", escaped)


def _first_bytes(pattern: str) -> frozenset[int]:
    """Returns the bytes with which the UTF-8 of a match may begin."""
    lookup = _byte_tokenizer()
    matcher = LLMatcher(lookup, LLMatcher.grammar_from_lark(f"start: /{pattern}/"), log_level=0)
    mask = allocate_token_bitmask(1, lookup.vocab_size)
    fill_next_token_bitmask(matcher, mask)
    if matcher.is_error() and not matcher.get_error().startswith("NoExtension"):  # which no text matches
        raise InvalidGrammar(f"{pattern} cannot be read: {matcher.get_error()[:200]}")
    found = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little"))
    return frozenset(found.tolist()) & frozenset(range(256))


class _Bytes:
    """A tokenizer whose tokens are bytes."""

    def __init__(self) -> None:
        self.eos_token_id, self.bos_token_id = 256, None
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]
        self.special_token_ids = [256]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache(1)
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


def _unsupported(construct: str) -> InvalidGrammar:
    return InvalidGrammar(f"{construct[:100]} is not supported in the Lark grammar of a tool's text")
