"""Finds regular expressions whose time can grow faster than the text that they read.

`python -m tools.expressions` lists those of the code that reads what clients and models send, and exits 1 if there are
any.

An expression takes more than linear time if its automaton can read some text w in three ways: from a state p back to p,
from p to another state q, and from q back to q. Then w, repeated n times before something that does not fit, takes n²
steps or more. A search adds a state before the first one that reads everything.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("shared", "llm_functionalities", "tgi_server/grammar", "tgi_server/router", "tgi_server/shard")
# Expressions that the automaton does not describe, and what makes them linear.
ACCEPTED = {
    "tgi_server/router/answers/frame.py": (
        "_PORTABLE",
        "atomic and possessive: what has matched is not tried again",
    ),
}
_MODULES = ("re", "regex")
_FUNCTIONS = ("compile", "search", "match", "fullmatch", "findall", "finditer", "split", "sub", "subn")
_ANCHORED = frozenset({"match", "fullmatch"})
# Maximum number of repetitions that are unrolled; the cost of more is bounded as well.
_MOST_COPIES = 3
_REPEATS = (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT)
_SAMPLES = "".join(map(chr, range(128))) + "\x85\xa0éß\u0660\u2028\u4e2d\ue000\U0001f600\U000f0000"

Characters = frozenset[str]


@dataclass(slots=True)
class _Part:
    """A part of an expression, as Glushkov's construction has it, by the numbers of its states.

    empty: it may match nothing. sure: it matches nothing wherever it stands. accepts: states after which the rest of it
    cannot fail.
    """

    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)
    accepts: set[int] = field(default_factory=set)
    empty: bool = True
    sure: bool = True


class Automaton:
    """The automaton of an expression. reads: of each state, the characters that lead to it. follows: its successors."""

    def __init__(self, pattern: str, flags: int, *, whole: bool, anchored: bool) -> None:
        """whole: the match has to reach the end of the text. anchored: it begins where the search does."""
        self._flags = flags
        self._samples = sorted({*_SAMPLES, *pattern})
        self.reads: list[Characters] = []
        self.follows: list[set[int]] = []
        self.doubled = False  # the same text can be read in two ways by the same states
        tree = parser.parse(pattern, flags)
        self._flags = tree.state.flags
        part = self._sequence(tree)
        self.accepts = set() if whole else part.accepts
        if not (anchored or _begins_at_start(tree, self._flags)):
            start = self._state(frozenset(self._samples))
            self.follows[start] |= {start, *part.first}

    def is_linear(self) -> bool:
        """Returns True unless it can read a text in two ways that continue in parallel."""
        if self.doubled:
            return False
        reached = [self._reached(state) for state in range(len(self.reads))]
        circular = [state for state in range(len(self.reads)) if state in reached[state]]
        for state in circular:
            own = {each for each in circular if each in reached[state] and state in reached[each]}
            if self._splits(state, own):
                return False
        later = [each for each in circular if each not in self.accepts]
        return not any(
            state != other and other in reached[state] and self._runs_beside(state, other, reached)
            for state in circular
            for other in later
        )

    def _splits(self, state: int, own: set[int]) -> bool:
        """Returns True if two ways lead back to a state with the same text: the time is exponential."""
        return self._meets((state, state), (state, state), (own, own), lambda each: each[0] != each[1])

    def _runs_beside(self, state: int, other: int, reached: list[set[int]]) -> bool:
        loops = [{each for each in reached[loop] if loop in reached[each]} for loop in (state, other)]
        between = {each for each in reached[state] if other in reached[each]} | {state, other}
        return self._meets(
            (state, state, other), (state, other, other), (loops[0], between, loops[1] - self.accepts), None
        )

    def _meets(
        self,
        start: tuple[int, ...],
        end: tuple[int, ...],
        within: tuple[set[int], ...],
        by: Callable[[tuple[int, ...]], bool] | None,
    ) -> bool:
        """Returns True if one text leads from all states of `start` to those of `end`. by: true of one of the steps."""
        seen = {(start, by is None)}
        left = list(seen)
        while left:
            states, passed = left.pop()
            for following in self._steps(states, within):
                step = following, passed or (by is not None and by(following))
                if step == (end, True):
                    return True
                if step not in seen:
                    seen.add(step)
                    left.append(step)
        return False

    def _steps(self, states: tuple[int, ...], within: tuple[set[int], ...]) -> Iterator[tuple[int, ...]]:
        """Yields the states to which one character leads from all states."""
        ways: list[tuple[tuple[int, ...], Characters]] = [((), frozenset(self._samples))]
        for state, allowed in zip(states, within, strict=True):
            ways = [
                ((*way, each), common)
                for way, characters in ways
                for each in self.follows[state] & allowed
                if (common := characters & self.reads[each])
            ]
        return (way for way, _ in ways)

    def _reached(self, state: int) -> set[int]:
        found: set[int] = set()
        left = [state]
        while left:
            new = self.follows[left.pop()] - found
            found |= new
            left += new
        return found

    def _state(self, characters: Characters) -> int:
        self.reads.append(characters)
        self.follows.append(set())
        return len(self.reads) - 1

    def _sequence(self, items: Iterable[Any]) -> _Part:
        whole = _Part()
        for item in items:
            self._append(whole, self._part(*item))
        return whole

    def _append(self, whole: _Part, part: _Part) -> None:
        for state in whole.last:
            self.follows[state] |= part.first
        if whole.empty:
            whole.first |= part.first
        whole.last = part.last | (whole.last if part.empty else set())
        whole.accepts = part.accepts | (whole.accepts if part.sure else set())
        whole.empty, whole.sure = whole.empty and part.empty, whole.sure and part.sure

    def _part(self, kind: Any, value: Any) -> _Part:
        if kind in _REPEATS:
            return self._repeated(*value)
        if kind is kinds.SUBPATTERN:
            return self._sequence(value[-1])
        if kind is kinds.ATOMIC_GROUP:
            return self._sequence(value)
        if kind is kinds.BRANCH:
            parts = [self._sequence(each) for each in value[1]]
            self.doubled |= sum(part.sure for part in parts) > 1
            return _joined(parts)
        if kind in (kinds.ASSERT, kinds.ASSERT_NOT):
            ahead = self._sequence(value[1])
            return _Part(first=ahead.first, sure=False)
        if kind is kinds.AT and value is kinds.AT_BEGINNING and self._flags & re.MULTILINE:
            state = self._state(frozenset("\n"))  # the line feed before it
            return _Part({state}, {state}, empty=False, sure=False)
        if kind in (kinds.AT, kinds.GROUPREF, kinds.GROUPREF_EXISTS, kinds.FAILURE):
            return _Part(sure=False)
        state = self._state(frozenset(each for each in self._samples if self._fits(kind, value, each)))
        return _Part({state}, {state}, {state}, empty=False, sure=False)

    def _repeated(self, least: int, most: Any, items: Any) -> _Part:
        unbounded = most is kinds.MAXREPEAT
        whole = _Part()
        for number in range(max(1, min(least, _MOST_COPIES)) if unbounded else min(int(most), _MOST_COPIES)):
            part = self._sequence(items)
            if number >= least:
                part.empty = part.sure = True
            self._append(whole, part)
        if unbounded:
            for state in part.last:
                self.doubled |= bool(self.follows[state] & part.first)
                self.follows[state] |= part.first
        return whole

    def _fits(self, kind: Any, value: Any, character: str) -> bool:
        if self._flags & re.IGNORECASE and kind is not kinds.ANY:
            return any(self._is(kind, value, each) for each in {character, character.lower(), character.upper()})
        return self._is(kind, value, character)

    def _is(self, kind: Any, value: Any, character: str) -> bool:
        if kind is kinds.LITERAL:
            return bool(ord(character[0]) == value)
        if kind is kinds.NOT_LITERAL:
            return bool(ord(character[0]) != value)
        if kind is kinds.ANY:
            return bool(self._flags & re.DOTALL) or character != "\n"
        if kind is kinds.RANGE:
            return bool(value[0] <= ord(character[0]) <= value[1])
        if kind is kinds.CATEGORY:
            return _in_category(value, character)
        if kind is kinds.IN:
            negated = value[0][0] is kinds.NEGATE
            return any(self._is(each[0], each[1], character) for each in value[negated:]) != negated
        raise NotImplementedError(f"a part of the kind {kind}")


def _joined(parts: Iterable[_Part]) -> _Part:
    joined = _Part(empty=False, sure=False)
    for part in parts:
        joined.first |= part.first
        joined.last |= part.last
        joined.accepts |= part.accepts
        joined.empty |= part.empty
        joined.sure |= part.sure
    return joined


def _begins_at_start(tree: Any, flags: int) -> bool:
    if not tree:
        return False
    kind, value = tree[0]
    if kind is kinds.SUBPATTERN:
        return _begins_at_start(value[-1], flags)
    at_string = value is kinds.AT_BEGINNING_STRING or (value is kinds.AT_BEGINNING and not flags & re.MULTILINE)
    return kind is kinds.AT and at_string


def _in_category(category: Any, character: str) -> bool:
    escape = {"WORD": "w", "SPACE": "s", "DIGIT": "d"}[str(category).rsplit("_", 1)[1]]
    negated = "NOT" in str(category)
    return (re.fullmatch(f"\\{escape}", character) is not None) != negated


def is_linear(pattern: str | bytes, flags: int = 0, methods: Iterable[str] = ("search",)) -> bool:
    """Returns True if matching takes time in proportion to the text. methods: those of `re` that it is used with."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    used = set(methods)
    return Automaton(text, flags, whole=used == {"fullmatch"}, anchored=used <= _ANCHORED).is_linear()


@dataclass(frozen=True, slots=True)
class Expression:
    """A regular expression of the code. name: of the variable that it is assigned to.

    pattern: None where it is only known when the code runs.
    """

    file: str
    line: int
    name: str
    pattern: str | bytes | None
    flags: int = 0
    methods: frozenset[str] = frozenset({"search"})


def expressions(file: Path) -> Iterator[Expression]:
    """Yields the regular expressions that a file of Python has."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    methods = _methods(tree)
    names = {
        id(node.value): target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if (function := _function(node)) is None:
            continue
        assert isinstance(node, ast.Call)
        used = {function}
        if function == "compile":
            used = methods.get(names.get(id(node), ""), set()) & {*_FUNCTIONS} or {"search"}
        given = node.args[0] if node.args else None
        known = given.value if isinstance(given, ast.Constant) else None
        pattern = known if isinstance(known, str | bytes) else None
        rest = [*node.args[1:], *(each.value for each in node.keywords if each.arg == "flags")]
        flags = sum(_flag(each) for part in rest for each in ast.walk(part))
        name = names.get(id(node), "")
        yield Expression(str(file.relative_to(ROOT)), node.lineno, name, pattern, flags, frozenset(used))


def _flag(node: ast.AST) -> int:
    """Returns the value of a flag such as `re.DOTALL`; 0 if it is something else."""
    return int(getattr(re, node.attr, 0)) if isinstance(node, ast.Attribute) and node.attr.isupper() else 0


def _function(node: ast.AST) -> str | None:
    """Returns the function of `re` that is called; None if it is something else."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    of = node.func.value
    known = isinstance(of, ast.Name) and of.id in _MODULES and node.func.attr in _FUNCTIONS
    return node.func.attr if known else None


def _methods(tree: ast.Module) -> dict[str, set[str]]:
    """Returns the methods that are called of each name."""
    methods: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            methods.setdefault(node.value.id, set()).add(node.attr)
    return methods


def faults() -> Iterator[str]:
    """Yields a line for each expression of the checked folders that may take more than linear time."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if "stubs" in file.parts:
                continue
            for each in expressions(file):
                accepted = ACCEPTED.get(each.file, ("",))[0] == each.name != ""
                if each.pattern is None or accepted or is_linear(each.pattern, each.flags, each.methods):
                    continue
                yield f"{each.file}:{each.line}: {each.pattern!r} may take more than linear time"


def main() -> int:
    found = list(faults())
    print("\n".join(found) or "every regular expression takes linear time")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
