"""Limits the time and memory of one rendering of a chat template."""

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Any

from jinja2 import TemplateError
from jinja2.utils import Namespace

# Maximum seconds of a rendering, and maximum characters of all texts and lists that it builds, up to four bytes each.
RENDER_SECONDS = 5.0
_CHARACTERS = 2**26
# Maximum nesting of calls of macros, blocks and recursive loops, and of lists.
_DEEPEST_CALL = 100
_DEEPEST_LIST = 256
# Characters for which a member of a list or an object counts, and maximum characters of a float as text.
MEMBER = 12
_NUMBER = 32
# Maximum characters of an escaped character in JSON and Python.
_ESCAPED = 6
_CONTAINERS = (Mapping, list, tuple, set, frozenset, ItemsView, KeysView, ValuesView, Namespace)


def render_deadline() -> float:
    """Returns the deadline of a rendering that begins now, on the clock of `time.monotonic()`."""
    return monotonic() + RENDER_SECONDS


class Allowance:
    """The time and memory that one rendering has left. Templates cannot access it, as it is not a variable."""

    def __init__(self, size: int = _CHARACTERS, until: float | None = None) -> None:
        """size: maximum characters that the template may build. until: its deadline, on the clock of `monotonic()`."""
        self._deadline = render_deadline() if until is None else until
        self._size = self._left = size
        self._depth = 0

    def check_time(self) -> None:
        """Raises TemplateError after the deadline."""
        if monotonic() > self._deadline:
            raise TemplateError(f"rendering takes more than {RENDER_SECONDS} s; send fewer or shorter messages")

    def take(self, size: int) -> None:
        """Counts characters before they are built. Raises TemplateError beyond the limit, or after the deadline."""
        self.check_time()
        if size > self._left:
            raise TemplateError(f"the template builds more than {self._size} characters of text")
        self._left -= max(size, 0)

    def take_value(self, value: Any) -> None:
        """Counts the maximum characters of a value as text. A list may contain another list many times."""
        self.take(self.expanded(value))

    def check_value(self, value: Any) -> None:
        """Raises TemplateError for a list that is too large to compare. Counts no characters."""
        if isinstance(value, _CONTAINERS):
            self.check_time()
            if self.expanded(value) > self._size:
                raise TemplateError(f"the template uses a list of more than {self._size} characters")

    def expanded(self, value: Any) -> int:
        """Returns the maximum number of characters that a value has as text."""
        return _expanded(value, {}, 0)

    def collected(self, items: Iterable[Any]) -> list[Any]:
        """Returns the items as a list. Counts it as it grows."""
        collected = []
        for item in items:
            self.take(MEMBER)
            collected.append(item)
        return collected

    @contextmanager
    def deeper(self) -> Iterator[None]:
        """Counts a nested call. Raises TemplateError if calls are nested too deep."""
        if self._depth >= _DEEPEST_CALL:
            raise TemplateError(f"the template's macros call each other more than {_DEEPEST_CALL} deep")
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


def _expanded(value: Any, known: dict[int, tuple[int, Any]], depth: int) -> int:
    """Returns the maximum characters of a value as text. known: sizes of lists by `id`, to visit each once."""
    if isinstance(value, str):
        return _ESCAPED * len(value) + 2
    if isinstance(value, int):
        return _NUMBER + value.bit_length() // 3
    if not isinstance(value, _CONTAINERS):
        return _NUMBER
    if depth > _DEEPEST_LIST:
        raise TemplateError(f"the template builds lists that nest more than {_DEEPEST_LIST} deep")
    if id(value) not in known:
        size = 2 + sum(MEMBER + _expanded(each, known, depth + 1) for each in _members(value))
        known[id(value)] = size, value  # kept, because another value could have its identity otherwise
    return known[id(value)][0]


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    if isinstance(value, Mapping):
        return [each for pair in value.items() for each in pair]
    return list(value)


_current: ContextVar[Allowance] = ContextVar("template_allowance")


def current_allowance() -> Allowance:
    """Returns the allowance of the rendering in this thread. Raises LookupError outside of `rendering`."""
    return _current.get()


@contextmanager
def rendering(allowance: Allowance) -> Iterator[None]:
    """Charges `allowance` for what this thread renders in the context."""
    token = _current.set(allowance)
    try:
        yield
    finally:
        _current.reset(token)
